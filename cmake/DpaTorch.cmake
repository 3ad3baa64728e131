# The Python environment's torch: what it is; and dpa_torch_targets(), which makes torch::cpu and torch::cuda of its libraries.
#
# torch's own CMake package wants a whole CUDA toolkit even for a CPU build against a CUDA wheel, and adds flags of its
# own to the CUDA compiler. The library needs three shared objects and two include folders, so it names them itself.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import importlib.util, pathlib, re
root = pathlib.Path(importlib.util.find_spec('torch').origin).parent
facts = (root / 'version.py').read_text()
version = re.search(r\"__version__ = '([^']+)'\", facts)[1]
cuda = re.search(r\"^cuda\\b.*= '(\\d+)\", facts, re.M)
print(f'{root};{version};{cuda[1] if cuda else 0}', end='')"
  OUTPUT_VARIABLE torch_facts RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: pip install torch==2.11.0")
endif()
list(GET torch_facts 0 DPA_TORCH_ROOT)
list(GET torch_facts 1 DPA_TORCH_VERSION)
list(GET torch_facts 2 DPA_TORCH_CUDA) # the major version, 0 for a build for the CPU
message(STATUS "dpa: torch ${DPA_TORCH_VERSION} in ${DPA_TORCH_ROOT}")

macro(dpa_torch_targets)
  if(DPA_WITH_CUDA AND NOT DPA_TORCH_CUDA EQUAL DPA_CUDA_MAJOR)
    message(FATAL_ERROR "torch ${DPA_TORCH_VERSION} goes with CUDA ${DPA_TORCH_CUDA} (0: none), and ${DPA_NVCC} is of CUDA "
                        "${DPA_CUDA_MAJOR}: build with DPA_CUDA=off, or set CUDACXX to an nvcc of CUDA ${DPA_TORCH_CUDA}")
  endif()
  add_library(torch::cpu INTERFACE IMPORTED)
  target_include_directories(torch::cpu SYSTEM INTERFACE
    "${DPA_TORCH_ROOT}/include" "${DPA_TORCH_ROOT}/include/torch/csrc/api/include")
  target_link_libraries(torch::cpu INTERFACE
    "${DPA_TORCH_ROOT}/lib/libtorch_cpu.so" "${DPA_TORCH_ROOT}/lib/libc10.so")
  # A gcc built without shared libraries would link a static copy of the C++ library beside torch's shared one. A message
  # that one of the two began and the other goes on with ends the process.
  set(shared_cxx libstdc++.so.6)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" "-print-file-name=${shared_cxx}" OUTPUT_VARIABLE found_cxx
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(IS_ABSOLUTE "${found_cxx}")
    target_link_libraries(torch::cpu INTERFACE "-l:${shared_cxx}")
  endif()

  add_library(torch::cuda INTERFACE IMPORTED)
  if(DPA_WITH_CUDA)
    target_compile_definitions(torch::cuda INTERFACE DPA_WITH_CUDA)
    target_include_directories(torch::cuda SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    # libtorch_cuda has the generator whose stream dpa::normal_draws goes on with.
    target_link_libraries(torch::cuda INTERFACE torch::cpu "${DPA_TORCH_ROOT}/lib/libc10_cuda.so"
                                                "${DPA_TORCH_ROOT}/lib/libtorch_cuda.so" "${DPA_CUDART}")
  endif()
endmacro()
