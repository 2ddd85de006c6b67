//! Parses addresses, and checks the data endpoint that a publisher names.

use crate::error::Error;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Address of a socket.
#[derive(Clone, Debug, PartialEq)]
pub enum Endpoint {
    Tcp { host: String, port: u16 },
    Ipc(PathBuf),
}

impl Endpoint {
    /// Parses an address to connect to.
    pub fn parse(address: &str) -> Result<Endpoint, Error> {
        let invalid = || Error::Address {
            address: address.to_owned(),
            text: "this is not an address to connect to; write tcp://HOST:PORT or ipc://PATH".to_owned(),
        };
        if let Some(path) = address.strip_prefix("ipc://") {
            let plain = !path.is_empty() && !path.contains(char::is_whitespace);
            return if plain { Ok(Endpoint::Ipc(PathBuf::from(path))) } else { Err(invalid()) };
        }
        let rest = address.strip_prefix("tcp://").ok_or_else(invalid)?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(invalid)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let in_brackets = bare.is_some();
        let host = bare.unwrap_or(host);
        let plain = !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || c == '/');
        let digits = (1..=5).contains(&port.len()) && port.bytes().all(|c| c.is_ascii_digit());
        if !plain || !digits || (host.contains(':') && !in_brackets) {
            return Err(invalid());
        }
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(invalid)?;
        Ok(Endpoint::Tcp { host: host.to_owned(), port })
    }

    /// Splits a list at the commas before addresses; any other comma belongs to a path.
    pub fn addresses_in(list: &str) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        for part in list.split(',') {
            let address = part.trim_start();
            let begins = ["tcp://", "ipc://"].iter().any(|scheme| address.starts_with(scheme));
            match found.last_mut() {
                Some(last) if !begins => *last += &format!(",{}", part),
                Some(_) => found.push(address.to_owned()),
                None => found.push(part.to_owned()),
            }
        }
        found
    }

    /// Returns the data endpoint for the address `named` that a publisher sent. `control` is the
    /// control address of this worker's connection, and `peer` its IP address. A host of `*` stands
    /// for the host of `control`. Unless `anywhere`, any other endpoint must be on that host, or at
    /// the path of `control` plus a suffix: otherwise a publisher could make a worker connect to
    /// anything that the worker can reach.
    pub fn of_data(
        named: &str,
        control: &str,
        peer: Option<IpAddr>,
        anywhere: bool,
    ) -> Result<Endpoint, Error> {
        match (Endpoint::parse(named)?, Endpoint::parse(control)?) {
            (Endpoint::Tcp { host, port }, Endpoint::Tcp { host: used, .. }) if is_any(&host) => {
                Ok(Endpoint::Tcp { host: used, port })
            }
            (Endpoint::Tcp { host, .. }, Endpoint::Ipc(_)) if is_any(&host) => Err(Error::Address {
                address: named.to_owned(),
                text: format!(
                    "the publisher's data is on the host of its control address, but {:?} names no \
                     host; give the publisher an address to advertise",
                    control
                ),
            }),
            (endpoint, used) if anywhere || endpoint.is_beside(&used, peer) => Ok(endpoint),
            _ => Err(Error::Address {
                address: named.to_owned(),
                text: format!(
                    "the publisher's data is not on the host of its control address {:?} (or, of a path, not \
                     beside it): if that address is right, allow it with any_data_host",
                    control
                ),
            }),
        }
    }

    /// True if this endpoint is on the host of `control`, or at the path of `control` with a
    /// suffix.
    fn is_beside(&self, control: &Endpoint, peer: Option<IpAddr>) -> bool {
        match (self, control) {
            (Endpoint::Ipc(path), Endpoint::Ipc(used)) => {
                let (path, used) = (path.as_os_str().as_bytes(), used.as_os_str().as_bytes());
                path.strip_prefix(used).map_or(false, |suffix| !suffix.contains(&b'/'))
            }
            (Endpoint::Tcp { host, .. }, Endpoint::Tcp { host: used, .. }) => {
                host.eq_ignore_ascii_case(used)
                    || (is_loopback(host) && is_loopback(used))
                    || (peer.is_some() && host.parse().ok() == peer)
            }
            _ => false,
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().map_or(false, |ip| ip.is_loopback())
}

fn is_any(host: &str) -> bool {
    matches!(host, "*" | "0.0.0.0" | "::")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Endpoint {
        Endpoint::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn addresses_are_read() {
        assert_eq!(Endpoint::parse("tcp://localhost:5555").unwrap(), tcp("localhost", 5555));
        assert_eq!(Endpoint::parse("tcp://[::1]:5555").unwrap(), tcp("::1", 5555));
        assert_eq!(Endpoint::parse("ipc:///a/x").unwrap(), Endpoint::Ipc("/a/x".into()));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "tcp://",
            "tcp://a",
            "tcp://:1",
            "tcp://a:",
            "tcp://a:+1",
            "tcp://a:65536",
            "tcp://a:0",
            "tcp://a b:1",
            "tcp://::1:5",
            "ipc://",
            "ipc://a b",
            "udp://a:1",
            "a:1",
        ] {
            assert!(Endpoint::parse(text).is_err(), "{:?}", text);
        }
    }

    #[test]
    fn a_list_is_split_where_another_address_begins() {
        let list = "ipc:///a,b, tcp://c:1,ipc://d";
        assert_eq!(Endpoint::addresses_in(list), ["ipc:///a,b", "tcp://c:1", "ipc://d"]);
        assert_eq!(Endpoint::addresses_in("tcp://a:1,"), ["tcp://a:1,"]);
    }

    #[test]
    fn a_data_address_takes_the_host_that_was_used() {
        let data = |told, control| Endpoint::of_data(told, control, None, false).ok();
        assert_eq!(data("tcp://*:6", "tcp://here:5"), Some(tcp("here", 6)));
        assert_eq!(data("tcp://0.0.0.0:6", "tcp://here:5"), Some(tcp("here", 6)));
        assert_eq!(data("tcp://[::]:6", "tcp://[::1]:5"), Some(tcp("::1", 6)));
        assert_eq!(data("tcp://*:6", "ipc://x"), None);
    }

    #[test]
    fn data_of_another_host_is_taken_only_if_the_user_says_so() {
        for (told, control, beside) in [
            ("tcp://HERE:6", "tcp://here:5", true),
            ("tcp://127.0.0.7:6", "tcp://localhost:5", true),
            ("tcp://[::1]:6", "tcp://127.0.0.1:5", true),
            ("tcp://10.0.0.1:6", "tcp://10.0.0.1:5", true),
            ("tcp://10.0.0.2:6", "tcp://10.0.0.1:5", false),
            ("tcp://there:6", "tcp://10.0.0.1:5", false),
            ("tcp://169.254.169.254:80", "tcp://127.0.0.1:5", false),
            ("tcp://127.0.0.1:6", "tcp://10.0.0.1:5", false),
            ("ipc:///run/bus.data", "ipc:///run/bus", true),
            ("ipc:///run/bus/../docker.sock", "ipc:///run/bus", false),
            ("ipc:///run/docker.sock", "ipc:///run/bus", false),
            ("ipc:///run/docker.sock", "tcp://127.0.0.1:5", false),
            ("tcp://127.0.0.1:6", "ipc:///run/bus", false),
        ] {
            let found = |anywhere| Endpoint::of_data(told, control, None, anywhere).is_ok();
            assert_eq!((found(false), found(true)), (beside, true), "{} {}", told, control);
        }
        let peer = Some("10.0.0.1".parse().unwrap());
        let found = |told| Endpoint::of_data(told, "tcp://trainer:5", peer, false).is_ok();
        assert!(
            found("tcp://10.0.0.1:6") && !found("tcp://10.0.0.2:6"),
            "of a host that was found by its name"
        );
    }
}
