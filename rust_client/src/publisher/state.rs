//! What of a publisher outlives it: a folder with its epoch, and a lock.
//!
//! ```text
//! weightbus.json     {"sha256": ..., "table": {"epoch": ..., "versions": [...]}}
//! weightbus.lock     locked by the publisher that has the folder
//! ```
//!
//! It is the folder of the Python publisher, of which this one keeps the epoch alone. One with versions is refused:
//! a Python publisher that has it next would offer them again, under a later epoch than that of all that was published
//! since, and workers would go back to them. The table is replaced whole, so a crash at any moment leaves the one
//! before or the one after.

use crate::digest::hex;
use crate::error::Error;
use crate::json::Value;
use crate::raw::fork::{Own, Process};
use crate::raw::os;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const LOCK: &str = "weightbus.lock";
const TABLE: &str = "weightbus.json";
const PARTIAL: &str = "weightbus.json.partial";

/// A folder, locked until it is dropped.
pub struct StateFolder {
    path: PathBuf,
    lock: Own<File>,
    owner: Process,
}

impl Drop for StateFolder {
    fn drop(&mut self) {
        if self.owner.is_this() {
            let _ = os::unlock(&self.lock); // also for a child that was forked without our knowledge
        }
    }
}

impl StateFolder {
    /// Takes a folder, which is made if it is not there.
    pub fn open(path: &Path) -> Result<StateFolder, Error> {
        let broken =
            |error| Error::Io { what: format!("{} cannot be a state folder", path.display()), error };
        fs::create_dir_all(path).map_err(broken)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let lock = Own::open(|| options.open(path.join(LOCK))).map_err(broken)?;
        match os::lock_exclusive_nowait(&lock) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let holder = fs::read_to_string(path.join(LOCK)).unwrap_or_default();
                return Err(Error::Setup(format!(
                    "the state folder {} belongs to another publisher that is running ({}): stop that one, or give \
                     this one a folder of its own",
                    path.display(),
                    holder.trim()
                )));
            }
            Err(error) => return Err(broken(error)),
        }
        lock.set_len(0).map_err(broken)?;
        (&*lock).write_all(format!("process {}\n", std::process::id()).as_bytes()).map_err(broken)?;
        let folder = StateFolder { path: path.to_owned(), lock, owner: Process::this() };
        folder.check_for_versions()?;
        Ok(folder)
    }

    fn check_for_versions(&self) -> Result<(), Error> {
        if !self.table()?.1 {
            return Ok(());
        }
        Err(Error::Setup(format!(
            "the state folder {} has versions that a publisher in Python keeps, and would offer again over what this \
             one publishes: give this one a folder of its own",
            self.path.display()
        )))
    }

    /// The greatest epoch that this folder's publishers ever had.
    pub fn epoch(&self) -> Result<u64, Error> {
        Ok(self.table()?.0)
    }

    /// Writes an epoch down, before anybody hears of it.
    pub fn record(&self, epoch: u64) -> Result<(), Error> {
        let table = format!(r#"{{"epoch":{},"versions":[]}}"#, epoch.max(self.epoch()?));
        self.replace(&table).map_err(|error| {
            let what =
                format!("the epoch cannot be written to {}: make room, or use another", self.path.display());
            Error::Io { what, error }
        })
    }

    fn replace(&self, table: &str) -> io::Result<()> {
        let sealed = sealed(table);
        let partial = self.path.join(PARTIAL);
        let mut file = File::create(&partial)?;
        file.write_all(sealed.as_bytes())?;
        file.sync_all()?;
        fs::rename(&partial, self.path.join(TABLE))?;
        File::open(&self.path)?.sync_all()
    }

    /// The epoch in the table, and whether there are versions.
    fn table(&self) -> Result<(u64, bool), Error> {
        let file = self.path.join(TABLE);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, false)),
            Err(error) => return Err(Error::Io { what: format!("cannot read {}", file.display()), error }),
        };
        unsealed(&text).ok_or_else(|| {
            Error::Setup(format!(
                "{} is damaged: it does not match its own hash, so nobody knows which epochs there were; move it away, \
                 or use another state folder",
                file.display()
            ))
        })
    }
}

/// A table with its hash, as it stands in the file.
fn sealed(table: &str) -> String {
    format!("{{\"sha256\":\"{}\",\"table\":{}}}\n", hex(&Sha256::digest(table)), table)
}

/// Reads a table, if it is what was written.
fn unsealed(text: &str) -> Option<(u64, bool)> {
    let (seal, table) = text.trim_end().strip_suffix('}')?.split_once(r#""table":"#)?;
    let sha256 = hex(&Sha256::digest(table));
    if !seal.contains(&sha256) {
        return None;
    }
    let table = match serde_json::from_str(table).ok()? {
        Value::Object(table) => table,
        _ => return None,
    };
    let epoch = match table.get("epoch") {
        Some(Value::Integer(epoch)) => *epoch,
        None => 0,
        Some(_) => return None,
    };
    match table.get("versions") {
        Some(Value::List(versions)) => Some((epoch, !versions.is_empty())),
        None => Some((epoch, false)),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("weightbus-{}-{}", name, std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn an_epoch_outlives_its_publisher() {
        let path = folder("state");
        let state = StateFolder::open(&path).unwrap();
        assert_eq!(state.epoch().unwrap(), 0);
        state.record(7).unwrap();
        state.replace(r#"{"epoch":9,"versions":[]}"#).unwrap(); // as Python writes it
        drop(state);
        let state = StateFolder::open(&path).unwrap();
        state.record(8).unwrap();
        assert_eq!(state.epoch().unwrap(), 9);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_folder_with_versions_is_a_python_publishers() {
        let path = folder("versions");
        let table = r#"{"epoch":9,"versions":[{"model":"m"}]}"#;
        StateFolder::open(&path).unwrap().replace(table).unwrap();
        let text = StateFolder::open(&path).err().unwrap().to_string();
        assert!(
            text.contains(&path.display().to_string()) && text.contains("a folder of its own"),
            "{}",
            text
        );
        assert!(fs::read_to_string(path.join(TABLE)).unwrap().contains(table), "it is as it was");
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_folder_is_of_one_publisher() {
        let path = folder("locked");
        let state = StateFolder::open(&path).unwrap();
        let text = StateFolder::open(&path).err().unwrap().to_string();
        assert!(text.contains(&format!("process {}", std::process::id())), "{}", text);
        drop(state);
        assert!(StateFolder::open(&path).is_ok());
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn whoever_is_killed_while_it_writes_leaves_the_epoch_before() {
        let path = folder("killed");
        StateFolder::open(&path).unwrap().record(7).unwrap();
        let next = sealed(r#"{"epoch":9999,"versions":[]}"#);
        for end in 0..=next.len() {
            let epoch = 7 + end as u64;
            fs::write(path.join(PARTIAL), &next[..end]).unwrap();
            fs::write(path.join(LOCK), "process 1\n").unwrap(); // it is gone, and its lock with it
            let state = StateFolder::open(&path).unwrap();
            assert_eq!(state.epoch().unwrap(), epoch, "{} bytes", end);
            state.record(epoch + 1).unwrap();
        }
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_table_is_believed_whole_or_not_at_all() {
        let path = folder("cut");
        let state = StateFolder::open(&path).unwrap();
        let text = sealed(r#"{"epoch":1234,"versions":[]}"#);
        for end in 0..text.trim_end().len() {
            fs::write(path.join(TABLE), &text[..end]).unwrap();
            let error = state.epoch().unwrap_err().to_string();
            assert!(error.contains("damaged"), "{} bytes: {}", end, error);
            assert!(state.record(5).is_err(), "{} bytes", end);
        }
        fs::write(path.join(TABLE), text.trim_end()).unwrap();
        assert_eq!(state.epoch().unwrap(), 1234);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_folder_is_free_though_something_else_has_its_lock_open() {
        let path = folder("forked");
        let state = StateFolder::open(&path).unwrap();
        let inherited = state.lock.try_clone().unwrap(); // as a child has it that was forked
        drop(state);
        assert!(StateFolder::open(&path).is_ok());
        drop(inherited);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_damaged_table_is_found_out() {
        let path = folder("damaged");
        let state = StateFolder::open(&path).unwrap();
        state.record(1234).unwrap();
        let text = fs::read_to_string(path.join(TABLE)).unwrap();
        fs::write(path.join(TABLE), text.replace("1234", "1235")).unwrap();
        assert!(state.epoch().unwrap_err().to_string().contains("damaged"));
        fs::remove_dir_all(path).unwrap();
    }
}
