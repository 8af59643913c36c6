# Included by llama-cpp-python's project() to customise the build of llama.cpp.

# tools/install.py builds the targets llama and ggml only. llama-cpp-python would also install
# llama-common and mtmd, which this project does not use.
macro(install)
  if(NOT "${ARGV}" MATCHES "llama-common|mtmd")
    _install(${ARGV})
  endif()
endmacro()

# llama.cpp's AMX kernels crash at the first batch (llama.cpp issue 20824): GCC 12 drops the tile
# configuration that they build on the stack.
include(CheckCXXCompilerFlag)
foreach(feature amx-tile amx-int8 amx-bf16)
  check_cxx_compiler_flag(-m${feature} has_${feature})
  if(has_${feature})
    add_compile_options(-mno-${feature})
  endif()
endforeach()
