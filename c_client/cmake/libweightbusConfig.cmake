# find_package(libweightbus): the targets weightbus::c (shared) and weightbus::c_static.
#
# The static target links the libzmq, libcrypto and libsodium that CMake finds, or those that LIBWEIGHTBUS_ZMQ,
# LIBWEIGHTBUS_CRYPTO and LIBWEIGHTBUS_SODIUM name. With a static libzmq, it also links what libzmq.pc names.

get_filename_component(_weightbus_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET weightbus::c)
  add_library(weightbus::c SHARED IMPORTED)
  set_target_properties(weightbus::c PROPERTIES
    IMPORTED_LOCATION "${_weightbus_prefix}/lib/libweightbus.so.1"
    IMPORTED_SONAME "libweightbus.so.1"
    INTERFACE_INCLUDE_DIRECTORIES "${_weightbus_prefix}/include")

  find_library(LIBWEIGHTBUS_ZMQ zmq)
  if(NOT LIBWEIGHTBUS_ZMQ)
    set(LIBWEIGHTBUS_ZMQ zmq)  # not found here: the linker may find it
  elseif(LIBWEIGHTBUS_ZMQ MATCHES "\\.a$")
    find_package(PkgConfig QUIET)
    if(PKG_CONFIG_FOUND)
      pkg_check_modules(_weightbus_zmq QUIET libzmq)
    endif()
  endif()
  find_library(LIBWEIGHTBUS_CRYPTO crypto)
  if(NOT LIBWEIGHTBUS_CRYPTO)
    set(LIBWEIGHTBUS_CRYPTO crypto)
  endif()
  find_library(LIBWEIGHTBUS_SODIUM sodium)
  if(NOT LIBWEIGHTBUS_SODIUM)
    set(LIBWEIGHTBUS_SODIUM sodium)
  endif()
  add_library(weightbus::c_static STATIC IMPORTED)
  set_target_properties(weightbus::c_static PROPERTIES
    IMPORTED_LOCATION "${_weightbus_prefix}/lib/libweightbus.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_weightbus_prefix}/include"
    INTERFACE_LINK_LIBRARIES
      "${LIBWEIGHTBUS_ZMQ};${_weightbus_zmq_STATIC_LDFLAGS};${LIBWEIGHTBUS_CRYPTO};${LIBWEIGHTBUS_SODIUM};pthread;${CMAKE_DL_LIBS};m")
endif()
unset(_weightbus_prefix)
