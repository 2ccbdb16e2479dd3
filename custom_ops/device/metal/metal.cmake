# Device "metal": on macOS over Metal; on Linux, for tests, over a fake of it that runs the kernels on the CPU.
include(CMakeDependentOption)
cmake_dependent_option(KVFUSE_METAL "Build the Apple GPU back end" ON APPLE OFF)
option(KVFUSE_FAKE_METAL "Linux: device 'metal' over a fake Metal, and its host tests; never for a release" OFF)
if(KVFUSE_FAKE_METAL AND NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "[kvfuse] expected Linux for KVFUSE_FAKE_METAL; found ${CMAKE_SYSTEM_NAME}")
endif()
if(NOT KVFUSE_METAL AND NOT KVFUSE_FAKE_METAL)
  return()
endif()

set(KVFUSE_METAL_CPP "$ENV{KVFUSE_METAL_CPP}" CACHE PATH "metal-cpp: folder with Metal/Metal.hpp")
find_path(METAL_CPP_DIR Metal/Metal.hpp
  HINTS "${KVFUSE_METAL_CPP}" "${CMAKE_CURRENT_SOURCE_DIR}/../build/metal-cpp" NO_DEFAULT_PATH)
if(NOT METAL_CPP_DIR)
  message(FATAL_ERROR
    "[kvfuse] expected metal-cpp's Metal/Metal.hpp in KVFUSE_METAL_CPP or build/metal-cpp; found none "
    "(run tools/get_metal_cpp.sh, or build without the GPU: -DKVFUSE_METAL=OFF)")
endif()
message(STATUS "metal-cpp: ${METAL_CPP_DIR}")

set(metal_dir "${CMAKE_CURRENT_LIST_DIR}")

# Writes FUNCTION, which returns the Metal texts, into OUTPUT.
function(kvfuse_embed_metal function output)
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${Python_EXECUTABLE}" "${metal_dir}/embed_kernels.py" ${function} "${output}" ${ARGN}
    DEPENDS "${metal_dir}/embed_kernels.py" ${ARGN} ${KVFUSE_METAL_INPUTS}
    VERBATIM)
endfunction()

# The device and what it runs on, for the library and for its tests.
add_library(kvfuse_metal OBJECT "${metal_dir}/metal_cpp.cc" "${metal_dir}/metal_device.cc")
target_include_directories(kvfuse_metal PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}" include)
if(APPLE)
  target_include_directories(kvfuse_metal SYSTEM PRIVATE "${METAL_CPP_DIR}")
  # Without CoreGraphics a command-line program has no default device.
  target_link_libraries(kvfuse_metal PUBLIC "-framework Metal" "-framework Foundation" "-framework CoreGraphics")
else()
  set(metal_headers "${CMAKE_CURRENT_BINARY_DIR}/metal-cpp")
  execute_process(COMMAND "${Python_EXECUTABLE}" "${metal_dir}/fake/gcc_headers.py" "${METAL_CPP_DIR}" "${metal_headers}"
    COMMAND_ERROR_IS_FATAL ANY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${metal_dir}/fake/gcc_headers.py")
  target_sources(kvfuse_metal PRIVATE
    "${metal_dir}/fake/foundation.cc" "${metal_dir}/fake/metal_objects.cc" "${metal_dir}/fake/metal_queue.cc"
    "${metal_dir}/fake/msl_text.cc" "${metal_dir}/fake/objc_runtime.cc")
  target_include_directories(kvfuse_metal SYSTEM PUBLIC "${metal_headers}" "${metal_dir}/fake/include")
  target_compile_definitions(kvfuse_metal PUBLIC KVFUSE_FAKE_METAL)
  if(CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
    target_compile_definitions(kvfuse_metal PUBLIC __arm64__)  # Apple's name for it
  endif()
  target_link_libraries(kvfuse_metal PUBLIC ${CMAKE_DL_LIBS})
endif()
target_link_libraries(kvfuse_metal PUBLIC Threads::Threads)
target_compile_options(kvfuse_metal PRIVATE -Wall -Wextra -Wno-missing-field-initializers)
target_compile_definitions(kvfuse_metal PRIVATE KVFUSE_BUILDING_LIBRARY)

kvfuse_embed_metal(MetalKernelSource "${CMAKE_CURRENT_BINARY_DIR}/metal_text.cc" ${KVFUSE_METAL_SOURCES})
target_sources(kvfuse_ops PRIVATE "${metal_dir}/backend.cc" "${CMAKE_CURRENT_BINARY_DIR}/metal_text.cc")
target_compile_definitions(kvfuse_ops PRIVATE KVFUSE_METAL)
target_link_libraries(kvfuse_ops PRIVATE kvfuse_metal)
if(KVFUSE_FAKE_METAL)
  target_sources(kvfuse_ops PRIVATE "${metal_dir}/fake/emulated_runner.cc")
endif()

# tests/metal: over Metal itself on a Mac.
set(metal_tests "${CMAKE_CURRENT_SOURCE_DIR}/../tests/metal")
option(KVFUSE_METAL_TESTS "Build the host tests of device 'metal'" ${KVFUSE_FAKE_METAL})
if(KVFUSE_METAL_TESTS)
  kvfuse_embed_metal(HostKernelSource "${CMAKE_CURRENT_BINARY_DIR}/host_text.cc" "${metal_tests}/host.metal")
  add_executable(kvfuse_metal_test
    device/check.cc "${metal_tests}/host_any.cc" "${metal_tests}/host_main.cc" "${CMAKE_CURRENT_BINARY_DIR}/host_text.cc")
  if(KVFUSE_FAKE_METAL)
    target_sources(kvfuse_metal_test PRIVATE "${metal_tests}/host_fake.cc")
  endif()
  target_include_directories(kvfuse_metal_test PRIVATE "${metal_tests}")
  target_link_libraries(kvfuse_metal_test PRIVATE kvfuse_metal)
endif()
