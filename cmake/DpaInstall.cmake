# What goes into the wheel: libraries beside the Python package, where find_package(dpa) finds them, and the sources.
include(CMakePackageConfigHelpers)

# A library of ops, what it is built for, and the CMake package that names it, into a folder of the installation; `build`
# is where it lies before.
function(dpa_install_ops target folder torch_version build)
  file(RELATIVE_PATH to_site "/${folder}" "/")
  set(runpath "$ORIGIN/${to_site}torch/lib:$ORIGIN/${to_site}nvidia/cu13/lib:$ORIGIN/${to_site}nvidia/cuda_runtime/lib")
  if(DPA_TORCHES)
    set(runpath "$ORIGIN/..:$ORIGIN/${to_site}torch/lib")
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${runpath}" LIBRARY_OUTPUT_DIRECTORY "${build}")
  set(built_for "${why}")
  if(target MATCHES "-cpu$" AND DPA_WITH_CUDA)
    set(built_for "the CPU alone: torch is a build for it, or the driver too old for the kernels")
  endif()
  file(WRITE "${build}/built-for.txt" "${built_for}\n")
  file(WRITE "${build}/torch-version.txt" "${torch_version}\n")
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/dpaConfig.cmake.in" "${build}/dpaConfig.cmake"
                                INSTALL_DESTINATION "${folder}/cmake/dpa")
  write_basic_package_version_file("${build}/dpaConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
  install(TARGETS ${target} LIBRARY DESTINATION "${folder}")
  install(FILES "${build}/built-for.txt" "${build}/torch-version.txt" DESTINATION "${folder}")
  install(FILES "${build}/dpaConfig.cmake" "${build}/dpaConfigVersion.cmake" DESTINATION "${folder}/cmake/dpa")
endfunction()

# An editable installation has its sources already.
if(NOT SKBUILD_STATE STREQUAL "editable")
  install(FILES CMakeLists.txt DESTINATION dpa/sources)
  install(DIRECTORY cmake kernels ops DESTINATION dpa/sources PATTERN __pycache__ EXCLUDE)
endif()
