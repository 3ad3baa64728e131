# The library goes beside the Python package; find_package(dpa) finds it there.
include(CMakePackageConfigHelpers)

install(TARGETS dpa LIBRARY DESTINATION dpa/lib)
file(WRITE "${CMAKE_BINARY_DIR}/torch-version.txt" "${DPA_TORCH_VERSION}\n")
install(FILES "${CMAKE_BINARY_DIR}/built-for.txt" "${CMAKE_BINARY_DIR}/torch-version.txt" DESTINATION dpa/lib)

configure_package_config_file(cmake/dpaConfig.cmake.in "${CMAKE_BINARY_DIR}/dpaConfig.cmake"
                              INSTALL_DESTINATION dpa/lib/cmake/dpa)
write_basic_package_version_file("${CMAKE_BINARY_DIR}/dpaConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/dpaConfig.cmake" "${CMAKE_BINARY_DIR}/dpaConfigVersion.cmake"
        DESTINATION dpa/lib/cmake/dpa)
