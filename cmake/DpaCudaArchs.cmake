# Which compiler, which architectures, which code: functions alone, so that scripts can call them.

# The compiler: CUDACXX, CUDA_HOME, the toolkit of the CUDA that torch is built with, the PATH, the usual place, or the one
# that PyPI's nvidia-cuda-nvcc brings.
function(dpa_find_nvcc result major)
  get_filename_component(chosen "$ENV{CUDACXX}" DIRECTORY)
  find_program(DPA_NVCC nvcc
    HINTS "${chosen}" ENV CUDA_HOME "/usr/local/cuda-${major}"
    PATHS /usr/local/cuda "${Python_SITELIB}/nvidia/cu${major}"
    PATH_SUFFIXES bin)
  set(${result} "${DPA_NVCC}" PARENT_SCOPE)
endfunction()

# The architectures of the GPUs here, or 90a where there is none.
function(dpa_local_archs result reason)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities RESULT_VARIABLE failed ERROR_QUIET)
  if(failed OR NOT capabilities MATCHES "[0-9]")
    set(${result} 90a PARENT_SCOPE)
    set(${reason} "no GPU here, so the default" PARENT_SCOPE)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
  list(REMOVE_DUPLICATES capabilities)
  set(archs "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" arch "${capability}")
    if(arch EQUAL 90)
      set(arch 90a)
    endif()
    list(APPEND archs "${arch}")
  endforeach()
  set(${result} "${archs}" PARENT_SCOPE)
  set(${reason} "the GPU here" PARENT_SCOPE)
endfunction()

# nvcc's options: machine code for each architecture, and PTX of 8.0, which the driver of any other GPU from 8.0 on
# compiles, so that no build is without kernels there. It costs a fifth of the compiler's time. Compressed for size, all of
# it takes less room than one architecture's code does plain; but of the drivers that run CUDA 12's code, only those from
# 550 on can unpack that.
function(dpa_cuda_code_flags result archs version)
  set(flags "--generate-code=arch=compute_80,code=compute_80")
  if(version VERSION_GREATER_EQUAL 13)
    list(PREPEND flags "--compress-mode=size")
  endif()
  foreach(arch IN LISTS archs)
    if(NOT arch MATCHES "^[0-9]+[af]?$")
      message(FATAL_ERROR "DPA_CUDA_ARCHS must hold architectures such as 80, 90a or 100f, got ${arch}")
    endif()
    list(APPEND flags "--generate-code=arch=compute_${arch},code=sm_${arch}")
  endforeach()
  set(${result} ${flags} PARENT_SCOPE)
endfunction()

# For ops beside kernels that are built: what those were built for; and whether this torch can have their CUDA, whose
# headers are needed, not its compiler.
function(dpa_read_kernels why with_cuda)
  get_filename_component(folder "${DPA_KERNELS}" DIRECTORY)
  file(STRINGS "${folder}/built-for.txt" built LIMIT_COUNT 1)
  if(built MATCHES "^the CPU and CUDA" AND DPA_TORCH_CUDA GREATER 0)
    find_path(DPA_CUDA_INCLUDE crt/host_defines.h
      HINTS "${Python_SITELIB}/nvidia/cu${DPA_TORCH_CUDA}/include" "${Python_SITELIB}/nvidia/cuda_runtime/include"
            "${Python_SITELIB}/nvidia/cuda_nvcc/include" ENV CUDA_HOME
      PATHS "/usr/local/cuda-${DPA_TORCH_CUDA}/include" /usr/local/cuda/include
      PATH_SUFFIXES include)
    if(NOT DPA_CUDA_INCLUDE)
      set(package "nvidia-cuda-crt==${DPA_TORCH_CUDA}.*")
      if(DPA_TORCH_CUDA LESS 13)
        set(package "nvidia-cuda-nvcc-cu${DPA_TORCH_CUDA}")
      endif()
      message(FATAL_ERROR "CUDA's headers are not here: pip install \"${package}\"")
    endif()
    set(${with_cuda} ON PARENT_SCOPE)
    set(${why} "${built}" PARENT_SCOPE)
  else()
    set(${why} "the CPU alone" PARENT_SCOPE)
  endif()
endfunction()
