# cppzmq's own package file asks for a libzmq package file that Debian does not ship, so both are
# looked for by their headers and library.
#
# Defines the target CppZMQ::CppZMQ.
include(FindPackageHandleStandardArgs)

find_path(CppZMQ_INCLUDE_DIR zmq.hpp)
find_library(CppZMQ_LIBRARY zmq)
find_package_handle_standard_args(CppZMQ
  REASON_FAILURE_MESSAGE "install libzmq and cppzmq (Debian: libzmq3-dev cppzmq-dev)"
  REQUIRED_VARS CppZMQ_LIBRARY CppZMQ_INCLUDE_DIR)
mark_as_advanced(CppZMQ_INCLUDE_DIR CppZMQ_LIBRARY)

if(CppZMQ_FOUND AND NOT TARGET CppZMQ::CppZMQ)
  add_library(CppZMQ::CppZMQ UNKNOWN IMPORTED)
  set_target_properties(CppZMQ::CppZMQ PROPERTIES
    IMPORTED_LOCATION "${CppZMQ_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${CppZMQ_INCLUDE_DIR}")
endif()
