//! Decides what the owner of a public key may do, without files or sockets.
//!
//! The owner of a key has a role, and joins under one name or under the names that match a pattern.
//! Permissions may change at any time.

use crate::keys::fits;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Worker,
    /// A worker that may pass versions on to workers of its own.
    Relay,
    /// May request the roster; gets no weights, no group key and no data connection.
    Observer,
}

/// The permission of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The name under which the key's owner may join, or a pattern of names: one `*` stands for any
    /// number of characters.
    pub name: String,
    pub role: Role,
}

impl Grant {
    /// True if the key's owner may join under this name (K3).
    pub fn fits(&self, name: &str) -> bool {
        fits(&self.name, name)
    }

    /// True if the key's owner may receive versions under this name. If `relay`: true if the owner may
    /// also pass versions on (K4, K11).
    pub fn admits(&self, name: &str, relay: bool) -> bool {
        let reads = self.role == Role::Relay || (self.role == Role::Worker && !relay);
        reads && self.fits(name)
    }
}

/// Permissions by public key (40 characters of Z85).
pub type ByKey = BTreeMap<String, Grant>;

/// The permissions of all keys. The owner of any other key may do nothing.
#[derive(Debug, Default)]
pub struct Grants(ByKey);

impl Grants {
    pub fn new(by_key: ByKey) -> Grants {
        Grants(by_key)
    }

    /// Returns the permission of a key; `None` if the key is not allowed.
    pub fn get(&self, key: &str) -> Option<&Grant> {
        self.0.get(key)
    }

    /// True if the worker with this name and key may receive versions.
    pub fn may_read(&self, name: &str, key: &str) -> bool {
        self.get(key).map_or(false, |grant| grant.admits(name, false))
    }

    /// Replaces all permissions. Returns true if a previous permission was removed or changed.
    pub fn replace(&mut self, by_key: ByKey) -> bool {
        let revoked = self.0.iter().any(|(key, grant)| by_key.get(key) != Some(grant));
        self.0 = by_key;
        revoked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_key(rows: &[(&str, &str, Role)]) -> ByKey {
        let row =
            |&(key, name, role): &(&str, &str, Role)| (key.to_owned(), Grant { name: name.to_owned(), role });
        rows.iter().map(row).collect()
    }

    #[test]
    fn a_key_is_for_names_of_its_form() {
        let grant = |name: &str| Grant { name: name.to_owned(), role: Role::Worker };
        for (form, name) in
            [("w", "w"), ("*", "w"), ("gpu-*", "gpu-"), ("gpu-*", "gpu-1"), ("a*b", "ab"), ("a*b", "axb")]
        {
            assert!(grant(form).fits(name), "{} {}", form, name);
        }
        for (form, name) in [("w", "w2"), ("gpu-*", "gpu"), ("a*b", "a"), ("ab*ba", "aba")] {
            assert!(!grant(form).fits(name), "{} {}", form, name);
        }
    }

    #[test]
    fn a_relays_key_is_a_workers_too_and_a_workers_is_no_relays() {
        let grant = |role| Grant { name: "r-*".to_owned(), role };
        for (role, reads, relays) in
            [(Role::Worker, true, false), (Role::Relay, true, true), (Role::Observer, false, false)]
        {
            assert_eq!(grant(role).admits("r-1", false), reads, "{:?}", role);
            assert_eq!(grant(role).admits("r-1", true), relays, "{:?}", role);
            assert!(!grant(role).admits("w", false) && !grant(role).admits("w", true), "{:?}", role);
        }
    }

    #[test]
    fn only_workers_read_and_what_is_taken_is_noticed() {
        let mut grants = Grants::new(by_key(&[("a", "a", Role::Worker), ("b", "*", Role::Observer)]));
        assert!(grants.may_read("a", "a"));
        assert!(!grants.may_read("b", "a") && !grants.may_read("b", "b") && !grants.may_read("a", "c"));
        let more = [("a", "a", Role::Worker), ("b", "*", Role::Observer), ("c", "c", Role::Worker)];
        assert!(!grants.replace(by_key(&more)), "something was added");
        assert!(grants.replace(by_key(&[("a", "x", Role::Worker), more[1], more[2]])), "another name");
        assert!(grants.replace(by_key(&more[1..])), "one less");
        assert!(!grants.replace(by_key(&more[1..])), "the same");
        assert!(grants.replace(by_key(&[("b", "*", Role::Worker), more[2]])), "another role");
    }
}
