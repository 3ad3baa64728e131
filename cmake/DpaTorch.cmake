# A torch package: what it is, by dpa_torch_facts(), and dpa_torch_targets(), which makes torch::headers, torch::cpu and
# torch::cuda of it. The Python environment's own is DPA_TORCH_ROOT, of DPA_TORCH_VERSION and DPA_TORCH_CUDA.
#
# torch's own CMake package wants a whole CUDA toolkit even for a CPU build against a CUDA wheel, and adds flags of its
# own to the CUDA compiler. The library needs three shared objects and two include folders, so it names them itself.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

# Sets version and cuda (the major version, 0 for a build for the CPU) of the torch in a folder.
function(dpa_torch_facts root version cuda)
  if(NOT EXISTS "${root}/version.py")
    message(FATAL_ERROR "DPA_TORCHES must hold folders of torch packages, got ${root}")
  endif()
  file(STRINGS "${root}/version.py" facts)
  set(${cuda} 0 PARENT_SCOPE)
  foreach(fact IN LISTS facts)
    if(fact MATCHES "^__version__ = '([^']+)'")
      set(${version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    elseif(fact MATCHES "^cuda.*= '([0-9]+)")
      set(${cuda} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('torch').origin).parent, end='')"
  OUTPUT_VARIABLE DPA_TORCH_ROOT RESULT_VARIABLE failed ERROR_QUIET)
if(failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: pip install torch==2.11.0")
endif()
dpa_torch_facts("${DPA_TORCH_ROOT}" DPA_TORCH_VERSION DPA_TORCH_CUDA)
message(STATUS "dpa: torch ${DPA_TORCH_VERSION} in ${DPA_TORCH_ROOT}")

# The targets of the environment's torch; or of the one in a folder, in a namespace: dpa_torch_targets(<folder> <namespace>).
function(dpa_torch_targets)
  set(root "${DPA_TORCH_ROOT}")
  set(namespace torch)
  if(ARGC EQUAL 2)
    set(root "${ARGV0}")
    set(namespace "${ARGV1}")
  endif()
  add_library(${namespace}::headers INTERFACE IMPORTED GLOBAL)
  target_include_directories(${namespace}::headers SYSTEM INTERFACE
    "${root}/include" "${root}/include/torch/csrc/api/include")
  add_library(${namespace}::cpu INTERFACE IMPORTED GLOBAL)
  target_link_libraries(${namespace}::cpu INTERFACE
    ${namespace}::headers "${root}/lib/libtorch_cpu.so" "${root}/lib/libc10.so")
  # A gcc built without shared libraries would link a static copy of the C++ library beside torch's shared one. A message
  # that one of the two began and the other goes on with ends the process.
  set(shared_cxx libstdc++.so.6)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" "-print-file-name=${shared_cxx}" OUTPUT_VARIABLE found_cxx
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(IS_ABSOLUTE "${found_cxx}")
    target_link_libraries(${namespace}::cpu INTERFACE "-l:${shared_cxx}")
  endif()
  add_library(${namespace}::cuda INTERFACE IMPORTED GLOBAL)
  if(DPA_WITH_CUDA)
    target_include_directories(${namespace}::cuda SYSTEM INTERFACE ${DPA_CUDA_INCLUDE})
    # libtorch_cuda has the generator whose stream dpa::normal_draws goes on with.
    target_link_libraries(${namespace}::cuda INTERFACE
      ${namespace}::cpu "${root}/lib/libc10_cuda.so" "${root}/lib/libtorch_cuda.so" ${DPA_CUDART})
  endif()
endfunction()
