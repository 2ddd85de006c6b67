//! Sets the soname of the library, which has the number of the ABI.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libweightbus.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
