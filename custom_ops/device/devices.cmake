# The devices that run the kernels of metal/*.metal, each where its tools are: see device/device.h.
target_sources(kvfuse_ops PRIVATE device/check.cc device/device.cc device/layer_cache.cc
  device/layer_snapshot.cc device/layout.cc device/pool.cc device/step.cc device/stubs.cc)
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

include(device/metal/metal.cmake)

if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(emulated_kernels "${CMAKE_CURRENT_BINARY_DIR}/emulated_kernels.cc")
  kvfuse_translate(emulated BuiltinProgram "${emulated_kernels}")
  target_sources(kvfuse_ops PRIVATE
    device/emulated/device.cc device/emulated/fiber.cc device/emulated/grid.cc device/emulated/group.cc
    device/emulated/problem.cc
    "${emulated_kernels}")
  target_compile_definitions(kvfuse_ops PRIVATE KVFUSE_EMULATED)
  # Under sanitizers the kernels are looked at, and not what switches their stacks.
  set_source_files_properties(device/emulated/fiber.cc device/emulated/group.cc device/emulated/problem.cc
    PROPERTIES COMPILE_OPTIONS "-fno-sanitize=all")
  # Metal's char is signed. Kernels may leave a helper unused, and carry attributes of Metal.
  set_source_files_properties("${emulated_kernels}" PROPERTIES
    COMPILE_OPTIONS "-fsigned-char;-Wno-unused-function;-Wno-unused-const-variable;-Wno-unknown-pragmas")
endif()

# CUDA, where nvcc and a driver are found; the kernels take minutes to compile, so not where they could not run.
# KVFUSE_CUDA=ON in the environment builds them without a driver, OFF leaves them out.
set(cuda_default OFF)
if(DEFINED ENV{KVFUSE_CUDA})
  set(cuda_default "$ENV{KVFUSE_CUDA}")
elseif(EXISTS /dev/nvidiactl OR EXISTS /proc/driver/nvidia/version)
  set(cuda_default ON)
endif()
option(KVFUSE_CUDA "Build the cuda device when nvcc is found" ${cuda_default})
if(KVFUSE_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(KVFUSE_CUDA AND CMAKE_CUDA_COMPILER)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual 90-real)  # machine code for one, text that the driver compiles for others
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(cuda_kernels "${CMAKE_CURRENT_BINARY_DIR}/cuda_kernels.cu")
  kvfuse_translate(cuda BuiltinProgram "${cuda_kernels}")
  # A target of its own: the library's flags are the host compiler's.
  add_library(kvfuse_cuda_kernels OBJECT "${cuda_kernels}")
  set_target_properties(kvfuse_cuda_kernels PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON)
  target_include_directories(kvfuse_cuda_kernels PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}/include")
  # Equality is promised: no contraction of a*b+c.
  target_compile_options(kvfuse_cuda_kernels PRIVATE -fmad=false --threads=0)
  target_sources(kvfuse_ops PRIVATE device/cuda/device.cc device/cuda/staging.cc $<TARGET_OBJECTS:kvfuse_cuda_kernels>)
  target_compile_definitions(kvfuse_ops PRIVATE KVFUSE_CUDA)
  target_link_libraries(kvfuse_ops PRIVATE CUDA::cudart_static)
endif()
