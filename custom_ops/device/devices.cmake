# The devices that run the kernels of metal/*.metal, each where its tools are: see device/device.h.
target_sources(kvfuse_ops PRIVATE device/check.cc device/device.cc device/stubs.cc)
target_include_directories(kvfuse_ops PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")

file(GLOB KVFUSE_METAL_SOURCES CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/metal/*.metal")
file(GLOB KVFUSE_METAL_INPUTS CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/metal/*.h" "${CMAKE_CURRENT_SOURCE_DIR}/metal/*.py")

# Writes what TARGET (emulated, cuda, flat) needs of the kernels into OUTPUT.
function(kvfuse_translate target symbol output)
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/metal/translate.py" ${target} ${symbol} "${output}"
            ${KVFUSE_METAL_SOURCES}
    DEPENDS ${KVFUSE_METAL_SOURCES} ${KVFUSE_METAL_INPUTS}
    VERBATIM)
endfunction()

if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(emulated_kernels "${CMAKE_CURRENT_BINARY_DIR}/emulated_kernels.cc")
  kvfuse_translate(emulated BuiltinProgram "${emulated_kernels}")
  target_sources(kvfuse_ops PRIVATE
    device/emulated/device.cc device/emulated/fiber.cc device/emulated/grid.cc device/emulated/group.cc
    "${emulated_kernels}")
  target_compile_definitions(kvfuse_ops PRIVATE KVFUSE_EMULATED)
  # Metal's char is signed. Kernels may leave a helper unused, and carry attributes of Metal.
  set_source_files_properties("${emulated_kernels}" PROPERTIES
    COMPILE_OPTIONS "-fsigned-char;-Wno-unused-function;-Wno-unused-const-variable;-Wno-unknown-pragmas")
endif()
include(device/metal/metal.cmake)
