# Untested: vcpkg and crates.io could not be reached where this was written. SHA512 is that of the
# tag's archive, once it exists. As an overlay:
# vcpkg install weightbus --overlay-ports=cpp_client/recipes/vcpkg
vcpkg_from_github(
  OUT_SOURCE_PATH SOURCE_PATH
  REPO weightbus/weightbus
  REF "v${VERSION}"
  SHA512 0
)

find_program(CARGO cargo REQUIRED)  # vcpkg has no Rust: use rustup or the distribution
set(ENV{PKG_CONFIG_PATH} "${CURRENT_INSTALLED_DIR}/lib/pkgconfig")  # cargo finds libzmq there
set(ENV{LIBRARY_PATH} "${CURRENT_INSTALLED_DIR}/lib")  # for libcrypto and libsodium
if(VCPKG_LIBRARY_LINKAGE STREQUAL "static")
  set(ENV{PKG_CONFIG_ALL_STATIC} 1)
endif()

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}/cpp_client" OPTIONS -DWEIGHTBUS_BUILD=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME weightbus CONFIG_PATH lib/cmake/weightbus DO_NOT_DELETE_PARENT_CONFIG_PATH)
vcpkg_cmake_config_fixup(PACKAGE_NAME libweightbus CONFIG_PATH lib/cmake/libweightbus)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
