# With paths from the sources' folder on, one build folder takes what another has compiled.
find_program(DPA_CCACHE ccache)
if(DPA_CCACHE)
  get_filename_component(base "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${base}" "${DPA_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
