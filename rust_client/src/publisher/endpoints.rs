//! Parses the addresses at which a publisher listens, and derives the data address for workers.

use crate::error::Error;
use std::net::IpAddr;
use std::path::PathBuf;

/// An address to listen at.
#[derive(Clone, Debug, PartialEq)]
pub enum ListenAddress {
    /// `host` is written as the user wrote it, with brackets for IPv6. Port 0 means any free port.
    Tcp {
        host: String,
        port: u16,
    },
    Ipc(PathBuf),
}

impl ListenAddress {
    /// Parses an address of a user.
    pub fn parse(address: &str) -> Result<ListenAddress, Error> {
        let invalid = || {
            Error::Address {
            address: address.chars().take(200).collect(),
            text:
                "this is not an address to listen at; write tcp://HOST:PORT (port 0: any free one) or ipc://PATH"
                    .to_owned(),
        }
        };
        if let Some(path) = address.strip_prefix("ipc://") {
            let plain = !path.is_empty() && !path.contains(char::is_whitespace);
            return if plain { Ok(ListenAddress::Ipc(PathBuf::from(path))) } else { Err(invalid()) };
        }
        let (host, port) =
            address.strip_prefix("tcp://").and_then(|a| a.rsplit_once(':')).ok_or_else(invalid)?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let plain = !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || c == '/');
        let digits = !port.is_empty() && port.bytes().all(|c| c.is_ascii_digit());
        let port = if port == "*" { Some(0) } else { port.parse().ok().filter(|_| digits) };
        match port {
            Some(port) if plain && (bracketed || !host.contains(':')) => {
                Ok(ListenAddress::Tcp { host: host.to_owned(), port })
            }
            _ => Err(invalid()),
        }
    }

    /// Returns the address in ZeroMQ's notation.
    pub fn endpoint(&self) -> String {
        match self {
            ListenAddress::Tcp { host, port: 0 } => format!("tcp://{}:*", host),
            ListenAddress::Tcp { host, port } => format!("tcp://{}:{}", host, port),
            ListenAddress::Ipc(path) => format!("ipc://{}", path.display()),
        }
    }

    /// Returns the default data address for this control address: the port above, or the path with
    /// `.data` appended.
    pub fn beside(&self) -> ListenAddress {
        match self {
            ListenAddress::Tcp { host, port } => {
                let port = if (1..u16::MAX).contains(port) { port + 1 } else { 0 };
                ListenAddress::Tcp { host: host.clone(), port }
            }
            ListenAddress::Ipc(path) => {
                let mut beside = path.clone().into_os_string();
                beside.push(".data");
                ListenAddress::Ipc(PathBuf::from(beside))
            }
        }
    }

    /// True if only this host can reach this address.
    pub fn is_local(&self) -> bool {
        match self {
            ListenAddress::Ipc(_) => true,
            ListenAddress::Tcp { host, .. } => {
                let ip = host.trim_matches(|c| c == '[' || c == ']').parse::<IpAddr>();
                matches!(&host[..], "localhost" | "lo") || ip.map_or(false, |ip| ip.is_loopback())
            }
        }
    }

    /// Returns this data address as workers get it: with the host `*` if it has the host of the
    /// `control` address. A worker replaces `*` with the host that it connects to.
    pub fn advertised(&self, control: &ListenAddress) -> String {
        match (self, control) {
            (ListenAddress::Tcp { host, port }, ListenAddress::Tcp { host: its, .. }) if host == its => {
                format!("tcp://*:{}", port)
            }
            _ => self.endpoint(),
        }
    }
}

/// Fails if other hosts can reach this address, unless `exposure_allowed` (there are keys, or the user
/// chose `insecure`). `address` is `listen_at` as the user wrote it.
pub fn check_exposure(exposure_allowed: bool, address: &str, listen_at: &ListenAddress) -> Result<(), Error> {
    if exposure_allowed || listen_at.is_local() {
        return Ok(());
    }
    Err(Error::Address {
        address: address.to_owned(),
        text: "other hosts can reach it and would get the weights: give keys (a folder that weightbus keygen makes), \
               or set insecure if you trust all hosts of the network; 127.0.0.1 needs neither"
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> ListenAddress {
        ListenAddress::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn places_are_read() {
        assert_eq!(ListenAddress::parse("tcp://*:0").unwrap(), tcp("*", 0));
        assert_eq!(ListenAddress::parse("tcp://[::1]:*").unwrap(), tcp("[::1]", 0));
        assert_eq!(ListenAddress::parse("ipc:///a/b").unwrap(), ListenAddress::Ipc("/a/b".into()));
        let invalid = [
            "",
            "tcp://",
            "tcp://a",
            "tcp://a:",
            "tcp://a:+1",
            "tcp://a:65536",
            "tcp://a b:1",
            "tcp://::1:1",
        ];
        for text in invalid.iter().chain(&["ipc://", "ipc://a b", "udp://a:1"]) {
            assert!(ListenAddress::parse(text).is_err(), "{:?}", text);
        }
    }

    #[test]
    fn the_data_socket_goes_beside() {
        assert_eq!(tcp("a", 5).beside(), tcp("a", 6));
        assert_eq!(tcp("a", 0).beside(), tcp("a", 0));
        assert_eq!(tcp("a", 65535).beside(), tcp("a", 0));
        assert_eq!(ListenAddress::Ipc("/x/bus".into()).beside(), ListenAddress::Ipc("/x/bus.data".into()));
        assert_eq!(tcp("a", 6).advertised(&tcp("a", 5)), "tcp://*:6");
        assert_eq!(tcp("b", 6).advertised(&tcp("a", 5)), "tcp://b:6");
    }

    #[test]
    fn only_loopback_is_for_everybody() {
        for local in ["tcp://127.0.0.1:0", "tcp://localhost:1", "tcp://[::1]:1", "ipc://x"] {
            assert!(check_exposure(false, local, &ListenAddress::parse(local).unwrap()).is_ok(), "{}", local);
        }
        for open in ["tcp://*:0", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://trainer:1", "tcp://10.0.0.1:1"] {
            let listen_at = ListenAddress::parse(open).unwrap();
            assert!(check_exposure(false, open, &listen_at).is_err(), "{}", open);
            assert!(check_exposure(true, open, &listen_at).is_ok(), "{}", open);
        }
    }
}
