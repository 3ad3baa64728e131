# Decides whether CUDA kernels are built and for what, and says why. Sets DPA_WITH_CUDA.

include("${CMAKE_CURRENT_LIST_DIR}/DpaCudaArchs.cmake")

string(TOLOWER "${DPA_CUDA}" wanted)
if(NOT wanted MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "DPA_CUDA must be auto, on or off, got ${DPA_CUDA}")
endif()

set(DPA_WITH_CUDA OFF)
if(wanted STREQUAL "off")
  set(why "the CPU alone: DPA_CUDA is off")
elseif(DPA_KERNELS)
  dpa_read_kernels(why DPA_WITH_CUDA)
elseif(wanted STREQUAL "auto" AND DPA_TORCH_CUDA EQUAL 0)
  set(why "the CPU alone: torch ${DPA_TORCH_VERSION} is a build for it")
else()
  dpa_find_nvcc(nvcc "${DPA_TORCH_CUDA}")
  if(nvcc)
    set(DPA_WITH_CUDA ON)
  elseif(wanted STREQUAL "on" AND DPA_TORCH_CUDA LESS 13)
    message(FATAL_ERROR "DPA_CUDA is on, torch ${DPA_TORCH_VERSION} is of CUDA ${DPA_TORCH_CUDA}, and there is no nvcc: PyPI "
                        "has none of CUDA 12. Install NVIDIA's toolkit (conda install -c nvidia cuda-nvcc=12), or on Debian "
                        "fetch its compiler alone (make cuda12 in the checkout), and set CUDACXX")
  elseif(wanted STREQUAL "on")
    message(FATAL_ERROR "DPA_CUDA is on, but there is no nvcc: set CUDACXX, or pip install -r requirements/nvcc.txt")
  else()
    set(why "the CPU alone: there is no nvcc (CUDA=on fetches one from PyPI)")
  endif()
endif()

if(DPA_WITH_CUDA AND NOT DPA_KERNELS)
  if(DPA_CUDA_ARCHS STREQUAL "auto")
    dpa_local_archs(archs reason)
  else()
    set(archs "${DPA_CUDA_ARCHS}")
    set(reason "as asked")
  endif()
  set(CMAKE_CUDA_COMPILER "${nvcc}")
  set(CMAKE_CUDA_ARCHITECTURES OFF) # older CMakes refuse names such as 100f
  set(CMAKE_CUDA_STANDARD 17)
  enable_language(CUDA)
  dpa_cuda_code_flags(code_flags "${archs}" "${CMAKE_CUDA_COMPILER_VERSION}")
  # CMake 3.25 does not know how nvcc spells C++20.
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:${code_flags}>")
  # PyPI's compiler brings no runtime to link with: a library for one torch takes the one that this torch loads, a library
  # of kernels for any torch holds its own.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  set(DPA_CUDA_INCLUDE "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}")
  string(REGEX MATCH "^[0-9]+" DPA_CUDA_MAJOR "${CMAKE_CUDA_COMPILER_VERSION}")
  set(places "${Python_SITELIB}/nvidia/cu${DPA_CUDA_MAJOR}/lib" "${Python_SITELIB}/nvidia/cuda_runtime/lib"
             ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} /usr/local/cuda/lib64)
  if(DPA_TORCHES)
    find_file(DPA_CUDART_STATIC libcudart_static.a REQUIRED PATHS ${places})
  else()
    if(NOT DPA_TORCH_CUDA EQUAL DPA_CUDA_MAJOR)
      message(FATAL_ERROR "torch ${DPA_TORCH_VERSION} goes with CUDA ${DPA_TORCH_CUDA} (0: none), and ${DPA_NVCC} is of CUDA "
                          "${DPA_CUDA_MAJOR}: build with DPA_CUDA=off, or set CUDACXX to an nvcc of CUDA ${DPA_TORCH_CUDA}")
    endif()
    find_file(DPA_CUDART libcudart.so.${DPA_CUDA_MAJOR} REQUIRED PATHS ${places})
  endif()
  set(why "the CPU and CUDA ${CMAKE_CUDA_COMPILER_VERSION} for architectures ${archs} with PTX 80 (${reason})")
endif()
message(STATUS "dpa: building for ${why}")
file(WRITE "${CMAKE_BINARY_DIR}/built-for.txt" "${why}\n")
