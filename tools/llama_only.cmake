# Included by llama-cpp-python's project(): installs the libraries that are built and no others.
#
# tools/install.py builds the targets llama and ggml. llama-cpp-python's install rules also name
# llama-common and mtmd, which nothing here loads.
macro(install)
  if(NOT "${ARGV}" MATCHES "llama-common|mtmd")
    _install(${ARGV})
  endif()
endmacro()
