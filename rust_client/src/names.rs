//! Reports why the publisher's host name does not resolve, while there is no session.
//!
//! A failed attempt to connect does not say that the host has no address. So this module looks up
//! the name itself, in a separate thread, since a name server may answer late or never.

use crate::endpoint::Endpoint;
use crate::transfer::Time;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::mpsc::{sync_channel, Receiver, TryRecvError};
use std::thread;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(2); // without a session before a lookup; for its answer
const LOOKUP_INTERVAL: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(60); // between two reports of the same problem

type Resolve = fn(&str, u16) -> io::Result<()>;

/// Reports why a host name does not resolve.
pub struct Names {
    host: String,
    port: u16,
    resolve: Resolve,
    /// Since when there is no session.
    since: Option<Time>,
    pending: Option<Receiver<io::Result<()>>>, // receives the result of a lookup
    due: Time,                                 // when the pending lookup began, or the next one may begin
    reported_at: Option<Time>,
}

impl Names {
    /// Creates the check of an address's host; `None` if the address has no host name.
    pub fn of(address: &str) -> Option<Names> {
        Names::for_address(address, |host, port| (host, port).to_socket_addrs().map(drop))
    }

    fn for_address(address: &str, resolve: Resolve) -> Option<Names> {
        let (host, port) = match Endpoint::parse(address) {
            Ok(Endpoint::Tcp { host, port }) => (host, port),
            _ => return None,
        };
        let is_ip = host.split('%').next().map_or(false, |host| host.parse::<IpAddr>().is_ok());
        let (since, pending, due, reported_at) = (None, None, Time::ZERO, None);
        Some(Names { host, port, resolve, since, pending, due, reported_at }).filter(|_| !is_ip)
    }

    /// Returns a text with the reason that the host name does not resolve, at most once a minute.
    /// With a session (`in_session`), looks up nothing and returns `None`.
    pub fn poll(&mut self, in_session: bool, now: Time) -> Option<String> {
        if in_session {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert(now);
        if now < since + PATIENCE {
            return None;
        }
        let found = match self.pending.as_ref().map(|answer| answer.try_recv()) {
            None if now < self.due => return None,
            None => {
                self.look_up();
                self.due = now;
                return None;
            }
            Some(Err(TryRecvError::Empty)) if now < self.due + PATIENCE => return None,
            Some(Err(TryRecvError::Empty)) => return self.report("its name server does not answer", now),
            Some(Ok(found)) => found,
            Some(Err(TryRecvError::Disconnected)) => Ok(()), // no thread could be started
        };
        self.pending = None;
        self.due = now + LOOKUP_INTERVAL;
        match found {
            Ok(()) => {
                self.reported_at = None;
                None
            }
            Err(error) => self.report(&error.to_string(), now),
        }
    }

    fn look_up(&mut self) {
        let (sender, receiver) = sync_channel(1);
        let (host, port, resolve) = (self.host.clone(), self.port, self.resolve);
        let thread = thread::Builder::new().name("weightbus-lookup".to_owned());
        let _ = thread.spawn(move || sender.send(resolve(&host, port))); // without a thread, it drops `sender`
        self.pending = Some(receiver);
    }

    fn report(&mut self, why: &str, now: Time) -> Option<String> {
        if self.reported_at.map_or(false, |at| now < at + REPORT_INTERVAL) {
            return None;
        }
        self.reported_at = Some(now);
        Some(format!(
            "no address of the publisher's host {:?} is found ({}): check the name, and the name service of this host or \
             container; it is looked up again and again",
            self.host, why
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const SECOND: Duration = Duration::from_secs(1);

    fn unknown(_: &str, _: u16) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Other, "no such host"))
    }

    fn known(_: &str, _: u16) -> io::Result<()> {
        Ok(())
    }

    fn silent(_: &str, _: u16) -> io::Result<()> {
        thread::park_timeout(Duration::from_secs(60));
        Ok(())
    }

    /// Attends until there is an answer.
    fn answered(names: &mut Names, now: Time) -> Option<String> {
        let end = Instant::now() + Duration::from_secs(20);
        assert_eq!(names.poll(false, now), None);
        assert!(names.pending.is_some(), "nobody was asked");
        while names.pending.is_some() {
            assert!(Instant::now() < end, "never answered");
            if let Some(text) = names.poll(false, now) {
                return Some(text);
            }
            thread::yield_now();
        }
        None
    }

    #[test]
    fn a_host_that_is_not_found_is_told_once_in_a_while() {
        let mut names = Names::for_address("tcp://nowhere.invalid:5", unknown).unwrap();
        assert_eq!(names.poll(false, SECOND), None);
        assert_eq!(names.poll(false, SECOND + PATIENCE / 2), None);
        assert!(names.pending.is_none(), "it may be about to connect");
        let text = answered(&mut names, SECOND + PATIENCE).unwrap();
        assert!(text.contains("\"nowhere.invalid\" is found (no such host): check the name"), "{}", text);
        assert_eq!(
            answered(&mut names, SECOND + PATIENCE + LOOKUP_INTERVAL),
            None,
            "it was reported_at a moment ago"
        );
        assert!(answered(&mut names, SECOND + PATIENCE + REPORT_INTERVAL).is_some());
        assert_eq!(names.poll(true, REPORT_INTERVAL * 2), None);
        assert_eq!(names.poll(false, REPORT_INTERVAL * 2), None, "patience begins anew");
        assert!(names.pending.is_none());
    }

    #[test]
    fn a_host_that_is_found_is_not_told_of_and_one_of_a_silent_server_is() {
        let mut names = Names::for_address("tcp://somewhere:5", known).unwrap();
        assert_eq!(names.poll(false, Time::ZERO), None);
        assert_eq!(answered(&mut names, PATIENCE), None);
        let mut names = Names::for_address("tcp://somewhere:5", silent).unwrap();
        assert_eq!(names.poll(false, Time::ZERO), None);
        assert_eq!(names.poll(false, PATIENCE), None);
        let text = names.poll(false, PATIENCE * 2).unwrap();
        assert!(text.contains("its name server does not answer"), "{}", text);
    }

    #[test]
    fn only_names_are_looked_up() {
        for address in ["tcp://127.0.0.1:5", "tcp://[::1]:5", "tcp://[fe80::1%eth0]:5", "ipc://x"] {
            assert!(Names::of(address).is_none(), "{}", address);
        }
        assert!(Names::of("tcp://localhost:5").is_some());
    }
}
