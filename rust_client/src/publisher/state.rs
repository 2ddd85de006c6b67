//! The state folder: stores a publisher's epoch and versions on disk for the next publisher. A lock allows
//! one publisher at a time.
//!
//! ```text
//! weightbus.json                         {"sha256": ..., "table": {"epoch": ..., "versions": [...]}}
//! policy@1795253000123-42.safetensors    a version, named by model, epoch and number
//! weightbus.lock                         locked by the publisher that uses the folder
//! ```
//!
//! The Python publisher uses the same format (`state_folder.py`), so that either can take over from the
//! other. Files that the table `weightbus.json` does not name are ignored.
//!
//! A version is written to a partial file, which is synced and renamed; then the folder is synced. Next,
//! the table is replaced in the same way. Last, the files of dropped versions are deleted. So a crash at
//! any moment leaves the old table or the new one, and every file that the table names is complete. Since
//! disks may corrupt bytes, the table contains its own hash, and each version that is read is checked
//! against its digest.
//!
//! This module has no thread; the thread that writes is in `keeper.rs`.

use super::content::{Content, Copier};
use crate::digest::hex;
use crate::error::Error;
use crate::fields::is_name;
use crate::limits::{CHUNK_BYTES_MAX, INTEGER_MAX};
use crate::messages::Metadata;
use crate::raw::fork::{Own, Process};
use crate::raw::os;
use crate::transfer::Key;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const LOCK: &str = "weightbus.lock";
const TABLE: &str = "weightbus.json";
const DAMAGED: &str = "weightbus.json.damaged";
const SUFFIX: &str = ".safetensors";
const PARTIAL: &str = ".partial"; // the suffix of a file that is being written
const NAMES_MAX: usize = 64; // names of a version; after more restarts, a worker may fetch the bytes again
const SLICE_BYTES: usize = 1 << 22; // written after each call of `before_slice`
pub const HISTORY_MAX: usize = 10_000; // older versions of a model; bounded because each publish rewrites the table

/// The table's entry of a version on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    pub model: String,
    pub epoch: u64,
    pub version: u64,
    pub nbytes: u64,
    pub chunk_bytes: u64,
    /// The digest of the version in chunks of `chunk_bytes`.
    pub digest: String,
    /// The (epoch, version) pairs under which these bytes were published, newest first.
    pub names: Vec<Key>,
    /// The metadata of its publish.
    #[serde(default)]
    pub metadata: Metadata,
}

impl Stored {
    /// Returns the table's entry of a version. `names` are the earlier (epoch, version) pairs of the same
    /// bytes; the entry also gets the present pair.
    pub fn of(model: &str, (epoch, version): Key, content: &Content, names: &BTreeSet<Key>) -> Stored {
        Stored {
            model: model.to_owned(),
            epoch,
            version,
            nbytes: content.plan.nbytes,
            chunk_bytes: content.plan.chunk_bytes,
            digest: content.digest.clone(),
            names: newest_names(names.iter().copied().chain([(epoch, version)])),
            metadata: content.metadata.clone(),
        }
    }

    fn key(&self) -> Key {
        (self.epoch, self.version)
    }

    fn file(&self) -> String {
        format!("{}@{}-{}{}", self.model, self.epoch, self.version, SUFFIX)
    }

    fn is_valid(&self) -> bool {
        let positive = |number| (1..=INTEGER_MAX).contains(&number);
        let named = |&(epoch, version): &Key| epoch <= INTEGER_MAX && positive(version);
        let hexadecimal = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        is_name(&self.model)
            && positive(self.epoch)
            && positive(self.version)
            && self.nbytes <= INTEGER_MAX
            && (1..=CHUNK_BYTES_MAX).contains(&self.chunk_bytes)
            && self.digest.len() == 64
            && self.digest.bytes().all(hexadecimal)
            && self.names.iter().all(named)
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Table {
    #[serde(default)]
    epoch: u64, // greatest epoch of any publisher that used the folder
    #[serde(default)]
    versions: Vec<Stored>, // in the order in which they were written
}

#[derive(Serialize, Deserialize)]
struct HashedTable<'a> {
    sha256: String,
    #[serde(borrow)]
    table: &'a RawValue,
}

/// A state folder, which stays locked until this is dropped.
pub struct StateFolder {
    path: PathBuf,
    lock: Own<File>,
    owner: Process,
    history: usize,
    table: Table,
    faults: Vec<String>, // problems that are not reported yet
}

impl Drop for StateFolder {
    fn drop(&mut self) {
        if self.owner.is_this() {
            let _ = os::unlock(&self.lock); // so that a forked child's copy does not keep the lock
        }
    }
}

impl StateFolder {
    /// Removes and returns the texts of problems that are not reported yet.
    pub fn take_faults(&mut self) -> Vec<String> {
        std::mem::take(&mut self.faults)
    }

    /// Adds a problem to report.
    pub fn record_fault(&mut self, fault: String) {
        self.faults.push(fault);
    }

    /// Opens and locks a folder, and creates it if it is missing. `history` older versions of each
    /// model are kept. Fails with `Error::Setup` if another publisher has the lock.
    pub fn open(path: &Path, history: usize) -> Result<StateFolder, Error> {
        let broken =
            |error| Error::Io { what: format!("{} cannot be a state folder", path.display()), error };
        fs::create_dir_all(path).map_err(broken)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let lock = options.open(path.join(LOCK)).map(Own::new).map_err(broken)?;
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
        let (path, owner, table) = (path.to_owned(), Process::this(), Table::default());
        let mut folder = StateFolder { path, lock, owner, history, table, faults: Vec::new() };
        folder.read_table()?;
        folder.delete_leftovers().map_err(|error| {
            let what = format!("{} cannot be a state folder", folder.path.display());
            Error::Io { what, error }
        })?;
        Ok(folder)
    }

    /// Reads the table. If the table is damaged, renames its file, and starts without versions and with the
    /// greatest epoch in the names of files.
    fn read_table(&mut self) -> Result<(), Error> {
        let file = self.path.join(TABLE);
        let broken = |error| Error::Io { what: format!("{} cannot be read", file.display()), error };
        let used = self.file_names().map_err(broken)?.iter().filter_map(|name| epoch_of(name)).max();
        let epoch_min = used.unwrap_or(0).min(INTEGER_MAX);
        let text = match fs::read(&file) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(broken(error)),
        };
        self.table = match text.as_deref().map(parse_table) {
            None => Table::default(),
            Some(Ok(table)) => table,
            Some(Err(why)) => {
                fs::rename(&file, self.path.join(DAMAGED)).map_err(broken)?;
                self.faults.push(format!(
                    "{} is damaged ({}) and was moved to {}: no version is offered from this folder until one is \
                     published; its files are left as they are",
                    file.display(),
                    why,
                    DAMAGED
                ));
                Table::default()
            }
        };
        self.table.epoch = self.table.epoch.max(epoch_min);
        Ok(())
    }

    fn file_names(&self) -> io::Result<Vec<String>> {
        let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
        fs::read_dir(&self.path)?.map(name).collect()
    }

    /// Deletes files that a publisher left because it was killed while it wrote.
    fn delete_leftovers(&self) -> io::Result<()> {
        let named: BTreeSet<String> = self.table.versions.iter().map(Stored::file).collect();
        for name in self.file_names()? {
            let whole = name.strip_suffix(PARTIAL).unwrap_or(&name);
            let is_leftover = name.ends_with(PARTIAL) || (!named.is_empty() && !named.contains(&name));
            if is_leftover && epoch_of(whole).is_some() {
                remove(&self.path.join(name))?;
            }
        }
        Ok(())
    }

    /// Returns the greatest epoch of any publisher that used this folder.
    pub fn epoch(&self) -> u64 {
        self.table.epoch
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the table's entries of the newest version of each model.
    pub fn latest(&self) -> Vec<Stored> {
        let mut latest: BTreeMap<&str, &Stored> = BTreeMap::new();
        for stored in &self.table.versions {
            let known = latest.entry(&stored.model).or_insert(stored);
            if stored.key() > known.key() {
                *known = stored;
            }
        }
        latest.into_values().cloned().collect()
    }

    /// Reads a version, and checks the version against its digest. The error is the reason that the version
    /// cannot be offered.
    pub fn read(&self, stored: &Stored, copier: &mut Copier) -> Result<Content, String> {
        let name = stored.file();
        let broken = |what: &dyn std::fmt::Display| format!("{} cannot be offered: {}", name, what);
        let file = File::open(self.path.join(&name)).map(Own::new).map_err(|error| broken(&error))?;
        let mut content = copier.read_file(&file, stored.chunk_bytes).map_err(|text| broken(&text))?;
        content.metadata = stored.metadata.clone();
        if content.digest == stored.digest && content.plan.nbytes == stored.nbytes {
            return Ok(content);
        }
        Err(format!(
            "{} is damaged: it hashes to {}, and {} was published; it is not offered to workers. Publish anew",
            name, content.digest, stored.digest
        ))
    }

    // Writing.

    /// Writes the epoch of this publisher. Must be called before any worker learns the epoch. The
    /// publisher offers the `offered` versions as version 1 of the epoch, so they get that name, too.
    pub fn record_epoch(&mut self, epoch: u64, offered: &[Stored]) -> Result<(), Error> {
        let mut table = self.table.clone();
        table.epoch = table.epoch.max(epoch);
        for stored in table.versions.iter_mut().filter(|stored| offered.contains(stored)) {
            stored.names = newest_names(stored.names.drain(..).chain([(epoch, 1)]));
        }
        self.replace_table(table).and_then(|()| self.sync()).map_err(|error| {
            let what = format!(
                "the epoch cannot be written to {}: make room, or use another state folder",
                self.path.display()
            );
            Error::Io { what, error }
        })
    }

    /// Writes a version, and deletes versions of the model beyond the history. Calls `before_slice` before
    /// it writes each slice of `SLICE_BYTES`; an error of `before_slice` aborts the write. The previous
    /// files stay until the new file is complete.
    pub fn write(
        &mut self,
        stored: Stored,
        content: &Content,
        before_slice: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut older: Vec<Stored> = self.table.versions.clone();
        older.retain(|its| its.model == stored.model && its.key() != stored.key());
        older.sort_by_key(|its| std::cmp::Reverse(its.key()));
        let dropped = older.split_off(older.len().min(self.history));
        let mut table = self.table.clone();
        table.versions.retain(|its| its.file() != stored.file() && !dropped.contains(its));
        table.epoch = table.epoch.max(stored.epoch);
        table.versions.push(stored.clone());
        let named = self.table.versions.contains(&stored);
        let written =
            replace(&self.path, &stored.file(), &[&content.header.bytes, content.bytes()], before_slice)
                .and_then(|()| self.sync()) // before the table names the file
                .and_then(|()| self.replace_table(table));
        if let Err(error) = written {
            if !named {
                let _ = remove(&self.path.join(stored.file()));
            }
            return Err(error);
        }
        self.sync()?; // before the files that the table no longer names are deleted
        dropped.iter().try_for_each(|old| remove(&self.path.join(old.file())))
    }

    fn replace_table(&mut self, table: Table) -> io::Result<()> {
        let text = serde_json::to_string(&table)?;
        replace(&self.path, TABLE, &[with_hash(&text).as_bytes()], &mut || Ok(()))?;
        self.table = table;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path).map(Own::new)?.sync_all()
    }
}

/// Replaces a file by a new one that consists of these parts. A crash leaves the old file or the complete
/// new one.
fn replace(
    folder: &Path,
    name: &str,
    parts: &[&[u8]],
    before_slice: &mut dyn FnMut() -> io::Result<()>,
) -> io::Result<()> {
    let partial = folder.join(name.to_owned() + PARTIAL);
    let written = File::create(&partial).map(Own::new).and_then(|file| {
        for slice in parts.iter().flat_map(|part| part.chunks(SLICE_BYTES)) {
            before_slice()?;
            (&*file).write_all(slice)?;
        }
        file.sync_all()
    });
    let placed = written.and_then(|()| fs::rename(&partial, folder.join(name)));
    if placed.is_err() {
        let _ = remove(&partial);
    }
    placed
}

/// Deletes a file, if there is one.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the epoch in the name of a version's file; `None` for any other file.
fn epoch_of(name: &str) -> Option<u64> {
    let (model, numbers) = name.strip_suffix(SUFFIX)?.split_once('@')?;
    let (epoch, version) = numbers.split_once('-')?;
    let number = |text: &str| (1..=16).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_digit());
    if is_name(model) && number(epoch) && number(version) {
        epoch.parse().ok()
    } else {
        None
    }
}

/// Returns the newest `NAMES_MAX` of these (epoch, version) pairs, newest first.
fn newest_names(names: impl Iterator<Item = Key>) -> Vec<Key> {
    let names: BTreeSet<Key> = names.collect();
    names.into_iter().rev().take(NAMES_MAX).collect()
}

/// Returns the text of the table's file: the table, and its hash.
fn with_hash(table: &str) -> String {
    format!("{{\"sha256\":\"{}\",\"table\":{}}}\n", hex(&Sha256::digest(table)), table)
}

/// Parses the table's file, and checks the hash and the bounds of fields. The error says what is wrong.
fn parse_table(text: &[u8]) -> Result<Table, String> {
    let hashed: HashedTable = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if hashed.sha256 != hex(&Sha256::digest(hashed.table.get())) {
        return Err("it does not match its hash".to_owned());
    }
    let table: Table = serde_json::from_str(hashed.table.get()).map_err(|error| error.to_string())?;
    if table.epoch > INTEGER_MAX || !table.versions.iter().all(Stored::is_valid) {
        return Err("a field is out of bounds".to_owned());
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::super::content::TensorView;
    use super::*;
    use crate::dtype::Dtype;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("weightbus-{}-{}", name, std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    fn content(byte: u8) -> Content {
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[100], bytes: &[byte; 100] };
        Copier::default().copy(&[tensor], 32).unwrap()
    }

    fn stored(version: u64, content: &Content) -> Stored {
        Stored::of("m", (7, version), content, &BTreeSet::new())
    }

    fn write(folder: &mut StateFolder, version: u64) -> io::Result<()> {
        let content = content(version as u8);
        folder.write(stored(version, &content), &content, &mut || Ok(()))
    }

    fn files(path: &Path) -> Vec<String> {
        let all = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut all: Vec<String> = all.filter(|name| name.contains('@') || name.contains(PARTIAL)).collect();
        all.sort();
        all
    }

    #[test]
    fn what_is_written_is_there_again_byte_for_byte() {
        let path = folder("again");
        let mut state = StateFolder::open(&path, 0).unwrap();
        write(&mut state, 1).unwrap();
        drop(state);
        let mut state = StateFolder::open(&path, 0).unwrap();
        assert_eq!(state.epoch(), 7);
        let latest = state.latest();
        let read = state.read(&latest[0], &mut Copier::default()).unwrap();
        assert_eq!((read.bytes(), &read.digest), (content(1).bytes(), &content(1).digest));
        assert_eq!(read.header.bytes, content(1).header.bytes);
        state.record_epoch(9, &latest).unwrap();
        drop(state);
        let state = StateFolder::open(&path, 0).unwrap();
        assert_eq!((state.epoch(), &state.latest()[0].names), (9, &vec![(9, 1), (7, 1)]));
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn so_many_older_versions_are_kept() {
        let path = folder("history");
        for (history, left) in [(2, 3), (0, 1)] {
            let mut state = StateFolder::open(&path, history).unwrap();
            for version in 1..5 {
                write(&mut state, version).unwrap();
            }
            assert_eq!(files(&path).len(), left);
            assert_eq!(state.latest()[0].version, 4);
            fs::remove_dir_all(&path).unwrap();
        }
    }

    #[test]
    fn a_folder_is_of_one_publisher() {
        let path = folder("locked");
        let state = StateFolder::open(&path, 0).unwrap();
        let text = StateFolder::open(&path, 0).err().unwrap().to_string();
        assert!(text.contains(&format!("process {}", std::process::id())), "{}", text);
        let inherited = state.lock.try_clone().unwrap(); // as a forked child has it
        drop(state);
        assert!(StateFolder::open(&path, 0).is_ok());
        drop(inherited);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn whatever_ends_the_writing_leaves_what_was_there() {
        let path = folder("ended");
        let mut state = StateFolder::open(&path, 0).unwrap();
        write(&mut state, 1).unwrap();
        let before = fs::read(path.join(TABLE)).unwrap();
        let next = content(2);
        for at in 0..2 {
            let mut left = at;
            let mut before_slice = || {
                left -= 1;
                if left < 0 {
                    return Err(io::ErrorKind::Other.into());
                }
                Ok(())
            };
            assert!(state.write(stored(2, &next), &next, &mut before_slice).is_err());
            assert_eq!(fs::read(path.join(TABLE)).unwrap(), before);
            assert_eq!(files(&path), ["m@7-1.safetensors"]);
        }
        write(&mut state, 2).unwrap();
        assert_eq!(files(&path), ["m@7-2.safetensors"]);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn whoever_was_killed_while_it_wrote_has_left_the_table_before() {
        let path = folder("killed");
        write(&mut StateFolder::open(&path, 0).unwrap(), 1).unwrap();
        let next = with_hash(r#"{"epoch":9999,"versions":[]}"#);
        for end in 0..=next.len() {
            fs::write(path.join(TABLE.to_owned() + PARTIAL), &next[..end]).unwrap();
            fs::write(path.join("m@7-2.safetensors.partial"), b"half of it").unwrap();
            fs::write(path.join("m@7-2.safetensors"), b"which no table names yet").unwrap();
            let state = StateFolder::open(&path, 0).unwrap();
            assert_eq!((state.epoch(), state.latest()[0].version), (7, 1), "{} bytes", end);
            assert_eq!(files(&path)[0], "m@7-1.safetensors");
            assert!(!files(&path).iter().any(|name| name.starts_with("m@7-2")));
        }
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_damaged_table_is_put_aside_and_files_say_which_epochs_there_were() {
        let path = folder("damaged");
        write(&mut StateFolder::open(&path, 0).unwrap(), 1).unwrap();
        let text = fs::read_to_string(path.join(TABLE)).unwrap();
        let mut damaged: Vec<String> = (0..text.trim_end().len()).map(|end| text[..end].to_owned()).collect();
        damaged.push(text.replace("\"version\":1", "\"version\":2"));
        damaged.push(with_hash(r#"{"epoch":9,"versions":[{"model":"m"}]}"#));
        damaged.push(with_hash(r#"{"epoch":-9}"#));
        for damaged in damaged {
            fs::write(path.join(TABLE), &damaged).unwrap();
            let state = StateFolder::open(&path, 0).unwrap();
            assert_eq!((state.epoch(), state.latest().len()), (7, 0), "{}", damaged);
            assert!(state.faults[0].contains("is damaged"), "{:?}", state.faults);
            assert_eq!(fs::read_to_string(path.join(DAMAGED)).unwrap(), damaged);
            assert_eq!(files(&path), ["m@7-1.safetensors"], "left as it is");
        }
        fs::write(path.join(TABLE), text.trim_end()).unwrap();
        assert_eq!(StateFolder::open(&path, 0).unwrap().latest().len(), 1);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_damaged_file_is_never_offered() {
        let path = folder("rotten");
        let mut state = StateFolder::open(&path, 0).unwrap();
        write(&mut state, 1).unwrap();
        let (file, latest) = (path.join("m@7-1.safetensors"), state.latest());
        let whole = fs::read(&file).unwrap();
        let read = |bytes: &[u8]| {
            fs::write(&file, bytes).unwrap();
            state.read(&latest[0], &mut Copier::default()).map(drop)
        };
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert!(read(&damaged).is_err() && read(&whole[..at]).is_err(), "{}", at);
        }
        assert!(read(&[&whole[..], b"more"].concat()).is_err());
        read(&whole).unwrap();
        fs::remove_file(&file).unwrap();
        assert!(state.read(&latest[0], &mut Copier::default()).is_err());
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn names_are_bounded_and_files_are_told_apart() {
        assert_eq!(newest_names((1..100).map(|epoch| (epoch, 1))).len(), NAMES_MAX);
        assert_eq!(newest_names((1..100).map(|epoch| (epoch, 1)))[0], (99, 1));
        assert_eq!(epoch_of("a.b-c@12-3.safetensors"), Some(12));
        for other in
            ["@1-2.safetensors", "m@1.safetensors", "m@1-.safetensors", "m@1-2", "m@+1-2.safetensors"]
        {
            assert_eq!(epoch_of(other), None, "{}", other);
        }
    }
}
