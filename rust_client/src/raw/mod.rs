//! All unsafe code of this crate: memory maps, locks and options of the kernel, instructions of the
//! processor, C libraries, and casts between bytes and numbers. The code has safe interfaces, and a
//! comment at each block gives the reason that it is sound.
#![allow(unsafe_code)]

pub mod cast;
pub mod crc;
pub mod fork;
#[cfg_attr(not(feature = "keys"), path = "no_gcm.rs")]
pub mod gcm;
pub mod map;
pub mod memory;
pub mod os;
#[cfg_attr(not(target_os = "linux"), path = "no_epoll.rs")]
pub mod ready;
pub mod socket;
#[cfg_attr(not(feature = "keys"), path = "no_sodium.rs")]
pub mod sodium;
