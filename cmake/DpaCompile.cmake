# Language standard, warnings, ccache, sanitizers.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# No code here reads errno or floating-point traps; promising so lets loops vectorise.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
                    $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno> $<$<COMPILE_LANGUAGE:CXX>:-fno-trapping-math>)
add_link_options(-Wl,--no-undefined)

if(DPA_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DPA_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${DPA_SANITIZE})
endif()

include("${CMAKE_CURRENT_LIST_DIR}/DpaCcache.cmake")

# PyTorch's headers take longer to read than our code: several files share one reading, on few cores half of them. Every build
# has the same size by default, so that a compiler's cache serves them all.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
set(batch 7)
if(cores LESS_EQUAL 4)
  set(batch 60)
endif()
set(CMAKE_UNITY_BUILD ON CACHE BOOL "Compile several files as one")
set(CMAKE_UNITY_BUILD_BATCH_SIZE ${batch} CACHE STRING "How many: fewer and larger ones compile faster on few cores")
