"""weightbus for C++ and C, for Conan 2.

conan create cpp_client/recipes/conan    (from a clone; cargo and crates.io must be reachable)

Tested with Conan 2.34, with Debian's OpenSSL and libzmq instead of ConanCenter's, which was not
reachable.
"""

import os

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.env import Environment
from conan.tools.files import copy
from conan.tools.gnu import PkgConfigDeps


class Weightbus(ConanFile):
    """Exports the sources of the C++, C and Rust clients; CMake builds and installs them."""

    name = "weightbus"
    version = "0.1.0"
    license = "Apache-2.0"
    url = homepage = "https://github.com/weightbus/weightbus"
    description = "The weight bus for C++ and C: workers take a model's weights from their trainer"
    settings = "os", "arch", "compiler", "build_type"
    requires = "openssl/[>=1.1 <4]", "libsodium/[>=1.0.18 <2]", "zeromq/[>=4.3 <5]"
    # libweightbus.so links to these as shared libraries: cargo looks for no archives.
    default_options = {  # noqa: RUF012
        "openssl/*:shared": True,
        "libsodium/*:shared": True,
        "zeromq/*:shared": True,
    }

    def export_sources(self) -> None:
        """Take the C++ layer, the C ABI and the Rust core."""
        clients = os.path.join(self.recipe_folder, "..", "..", "..")
        for client in ("cpp_client", "c_client", "rust_client"):
            source = os.path.join(clients, client)
            target = os.path.join(self.export_sources_folder, client)
            copy(self, "*", source, target, excludes=("build/*", "target/*"))

    def layout(self) -> None:
        """The project is cpp_client."""
        cmake_layout(self, src_folder="cpp_client")

    def generate(self) -> None:
        """Build only what is installed, and let cargo find the required libraries."""
        toolchain = CMakeToolchain(self)
        toolchain.variables["WEIGHTBUS_BUILD"] = False
        toolchain.generate()
        PkgConfigDeps(self).generate()
        environment = Environment()
        environment.prepend_path("PKG_CONFIG_PATH", self.generators_folder)  # libzmq
        for dependency in self.dependencies.host.values():  # libcrypto, libsodium
            for folder in dependency.cpp_info.aggregated_components().libdirs:
                environment.prepend_path("LIBRARY_PATH", folder)
        environment.vars(self).save_script("cargo")

    def build(self) -> None:
        """Build libweightbus; the C++ layer consists of headers."""
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self) -> None:
        """Install both, with the license."""
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self) -> None:
        """Let CMake projects find the package by its installed CMake files."""
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/weightbus", "lib/cmake/libweightbus"]
