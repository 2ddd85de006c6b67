# find_package(libweightbus): the targets weightbus::c (shared) and weightbus::c_static.

get_filename_component(_weightbus_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
find_package(Threads REQUIRED)

if(NOT TARGET weightbus::c)
  add_library(weightbus::c SHARED IMPORTED)
  set_target_properties(weightbus::c PROPERTIES
    IMPORTED_LOCATION "${_weightbus_prefix}/lib/libweightbus.so.1"
    IMPORTED_SONAME "libweightbus.so.1"
    INTERFACE_INCLUDE_DIRECTORIES "${_weightbus_prefix}/include")

  add_library(weightbus::c_static STATIC IMPORTED)
  set_target_properties(weightbus::c_static PROPERTIES
    IMPORTED_LOCATION "${_weightbus_prefix}/lib/libweightbus.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_weightbus_prefix}/include"
    INTERFACE_LINK_LIBRARIES "zmq;Threads::Threads;${CMAKE_DL_LIBS};m")
endif()
unset(_weightbus_prefix)
