//! Reads a publisher's key folder, which `weightbus keygen` writes.
//!
//! ```text
//! DIR/publisher.json        the publisher's key pair
//! DIR/allowed/NAME.json     a public key whose owner may connect, with the owner's name and role
//! ```

use super::grants::{ByKey, Grant, Role};
use crate::error::Error;
use crate::fields::{word, Fault, Fields};
use crate::keys::{check_curve, check_pair, check_path, key_in, name_in, object_of, read, Unread};
use std::collections::btree_map::{BTreeMap, Entry};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const PUBLISHER: &str = "publisher.json";
const ALLOWED: &str = "allowed";
const KEYS_MAX: usize = super::roster::WORKERS_MAX; // allowed keys: one for each worker
const STILL_ALLOWED: &str = "until it can be, its key stays allowed: remove the file to revoke it";

/// The number of key files, and the path, inode, size and modification time of each file.
pub type Stamp = (usize, Vec<(PathBuf, [i64; 4])>);

/// A publisher's secret key, and the allowed public keys.
pub struct PublisherKeys {
    pub(super) secret: String, // 40 characters of Z85
    pub(super) by_key: ByKey,
    pub(super) allowed: Allowed,
}

impl fmt::Debug for PublisherKeys {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "PublisherKeys({}, of {})", self.allowed.folder.display(), self.by_key.len())
    }
}

impl PublisherKeys {
    /// Reads a key folder. Fails if any file in the folder is invalid.
    pub fn read(folder: &Path) -> Result<PublisherKeys, Error> {
        check_curve()?;
        check_path(folder)?;
        if !folder.is_dir() {
            return Err(Error::Keys(format!(
                "{0} is not a folder: the keys of a publisher must be a folder with {1} and {2}/; make it with: \
                 weightbus keygen {0} NAME...",
                folder.display(),
                PUBLISHER,
                ALLOWED
            )));
        }
        let file = folder.join(PUBLISHER);
        let path = file.display().to_string();
        let pair = |fields: &Fields| Ok((key_in(fields, "public")?, key_in(fields, "secret")?));
        let (public, secret) = object_of(&read(&file, true).map_err(Unread::error)?, &path, pair)?;
        check_pair(&public, &secret, &path)?;
        let mut odd = None;
        let mut allowed = Allowed::new(folder);
        let by_key = allowed.read(&mut |error| odd = odd.take().or(Some(error)))?;
        match odd {
            None => Ok(PublisherKeys { secret, by_key, allowed }),
            Some(error) => Err(error),
        }
    }
}

/// Reads the allowed keys of a publisher repeatedly. The removal of a file takes effect even if another
/// file is invalid.
pub struct Allowed {
    folder: PathBuf,
    known: BTreeMap<PathBuf, (String, Grant)>, // the key and permission in each file at the last read
    /// True if the last `read` could read all files. If not, the caller must read again.
    pub complete: bool,
}

impl Allowed {
    pub fn new(folder: &Path) -> Allowed {
        Allowed { folder: folder.join(ALLOWED), known: BTreeMap::new(), complete: true }
    }

    /// Returns the permissions by public key, and calls `complain` with each error of a file. An invalid
    /// file allows no key. A file that cannot be read allows the same key as at the last read. If there
    /// are too many files, new files are ignored. Fails if the folder cannot be read.
    pub fn read(&mut self, complain: &mut dyn FnMut(Error)) -> Result<ByKey, Error> {
        let (mut found, mut known) = (ByKey::new(), BTreeMap::new());
        self.complete = true;
        let (count, files) = self.files()?;
        if count > KEYS_MAX {
            let folder = self.folder.display();
            let text = format!("{} has {} keys; at most {} are allowed", folder, count, KEYS_MAX);
            complain(Error::Keys(text));
        }
        for file in files {
            let (key, grant) = match allowed_in(&file) {
                Ok(row) => row,
                Err(Unread::Odd(error)) => {
                    complain(error);
                    continue;
                }
                Err(Unread::Unreadable(error)) => {
                    self.complete = false;
                    match self.known.get(&file) {
                        Some(row) => {
                            complain(Error::Keys(format!("{}; {}", error, STILL_ALLOWED)));
                            row.clone()
                        }
                        None => {
                            complain(error);
                            continue;
                        }
                    }
                }
            };
            known.insert(file.clone(), (key.clone(), grant.clone()));
            match found.entry(key) {
                Entry::Vacant(entry) => {
                    entry.insert(grant);
                }
                Entry::Occupied(_) => complain(Error::Keys(format!(
                    "{}: another file there has the same key; remove one of the two",
                    file.display()
                ))),
            }
        }
        self.known = known;
        Ok(found)
    }

    /// Returns a value that changes when a file of an allowed key is added, changed or removed.
    pub fn stamp(&self) -> Result<Stamp, Error> {
        let look = |file: PathBuf| {
            let seen = fs::metadata(&file).ok()?; // fails if the file was just removed
            Some((file, [seen.ino() as i64, seen.size() as i64, seen.mtime(), seen.mtime_nsec()]))
        };
        let (count, files) = self.files()?;
        Ok((count, files.into_iter().filter_map(look).collect()))
    }

    /// Returns the number of key files, and their paths. If there are more than `KEYS_MAX`, returns only
    /// the paths of files known from the last read.
    fn files(&self) -> Result<(usize, Vec<PathBuf>), Error> {
        let unreadable =
            |error: io::Error| Error::Keys(format!("{} cannot be read: {}", self.folder.display(), error));
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(unreadable)? {
            let file = entry.map_err(unreadable)?.path();
            if file.extension().map_or(false, |suffix| suffix == "json") {
                files.push(file);
            }
        }
        let count = files.len();
        if count > KEYS_MAX {
            files.retain(|file| self.known.contains_key(file));
        }
        files.sort();
        Ok((count, files))
    }
}

/// Returns the public key in a file, and the permission of its owner.
fn allowed_in(file: &Path) -> Result<(String, Grant), Unread> {
    let row = |fields: &Fields| -> Result<_, Fault> {
        let role = fields.or("role", Role::Worker, word)?;
        Ok((key_in(fields, "public")?, Grant { name: name_in(fields)?, role }))
    };
    object_of(&read(file, false)?, &file.display().to_string(), row).map_err(Unread::Odd)
}

#[cfg(all(test, feature = "keys"))]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    const PUBLIC: [&str; 2] =
        ["Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"];
    const SECRET: &str = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"; // that of the first public key

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path =
                std::env::temp_dir().join(format!("weightbus-allowed-{}-{}", name, std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(path.join(ALLOWED)).unwrap();
            let folder = Folder(path);
            folder.write(
                PUBLISHER,
                &format!(r#"{{"public": "{}", "secret": "{}"}}"#, PUBLIC[0], SECRET),
                0o600,
            );
            folder
        }

        fn write(&self, file: &str, json: &str, mode: u32) {
            let file = self.0.join(file);
            fs::write(&file, json).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        }

        fn allow(&self, file: &str, name: &str, key: usize, role: &str) {
            let json = format!(r#"{{"name": "{}", "public": "{}"{}}}"#, name, PUBLIC[key], role);
            self.write(&format!("{}/{}", ALLOWED, file), &json, 0o644);
        }

        /// Makes a file that cannot be read.
        fn break_it(&self, file: &str) {
            let file = self.0.join(ALLOWED).join(file);
            let _ = fs::remove_file(&file);
            symlink(&file, &file).unwrap();
        }

        fn error(&self) -> String {
            PublisherKeys::read(&self.0).unwrap_err().to_string()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_folder_is_read() {
        let folder = Folder::new("read");
        folder.allow("gpu-+.json", "gpu-*", 0, "");
        folder.allow("eye.json", "eye", 1, r#", "role": "relay""#);
        let role = |keys: PublisherKeys| keys.by_key[PUBLIC[1]].role;
        assert_eq!(role(PublisherKeys::read(&folder.0).unwrap()), Role::Relay);
        folder.allow("eye.json", "eye", 1, r#", "role": "observer""#);
        folder.write("allowed/.part", "{", 0o600);
        let keys = PublisherKeys::read(&folder.0).unwrap();
        assert_eq!(keys.secret, SECRET);
        assert_eq!(keys.by_key[PUBLIC[0]], Grant { name: "gpu-*".to_owned(), role: Role::Worker });
        assert_eq!(keys.by_key[PUBLIC[1]], Grant { name: "eye".to_owned(), role: Role::Observer });
        assert!(!format!("{:?}", keys).contains(SECRET));
    }

    #[test]
    fn what_makes_no_sense_is_said_at_the_start() {
        let folder = Folder::new("odd");
        folder.allow("a.json", "a", 0, "");
        folder.allow("b.json", "b", 0, "");
        assert!(folder.error().contains("same key"));
        folder.allow("b.json", "b c", 1, "");
        assert!(folder.error().contains("is not a name"));
        folder.allow("b.json", "b", 1, r#", "role": "king""#);
        assert!(folder.error().contains("role"));
        fs::remove_file(folder.0.join("allowed/b.json")).unwrap();
        folder.write(PUBLISHER, &format!(r#"{{"public": "{}", "secret": "{}"}}"#, PUBLIC[1], SECRET), 0o600);
        assert!(folder.error().contains("do not belong together"));
        folder.write(PUBLISHER, "{}", 0o604);
        assert!(folder.error().contains("chmod 600"));
        fs::remove_file(folder.0.join(PUBLISHER)).unwrap();
        assert!(folder.error().contains("cannot be read"));
        let none = PublisherKeys::read(&folder.0.join("none")).unwrap_err().to_string();
        assert!(none.contains("is not a folder"), "{}", none);
        let json = PublisherKeys::read(Path::new("{secret}")).unwrap_err().to_string();
        assert!(!json.contains("secret}"), "{}", json);
    }

    #[test]
    fn later_a_file_that_makes_no_sense_allows_nothing_and_others_go_on() {
        let folder = Folder::new("later");
        folder.allow("a.json", "a", 0, "");
        folder.allow("b.json", "b", 1, "");
        let mut allowed = Allowed::new(&folder.0);
        let mut complaints = Vec::new();
        let before = allowed.stamp().unwrap();
        assert_eq!(allowed.read(&mut |error| complaints.push(error.to_string())).unwrap().len(), 2);
        folder.write("allowed/b.json", "{}", 0o644);
        assert!(allowed.stamp().unwrap() != before);
        let found = allowed.read(&mut |error| complaints.push(error.to_string())).unwrap();
        assert_eq!((found.len(), complaints.len(), allowed.complete), (1, 1, true));
        fs::remove_file(folder.0.join("allowed/b.json")).unwrap();
        folder.break_it("a.json");
        let found = allowed.read(&mut |error| complaints.push(error.to_string())).unwrap();
        assert_eq!((found.len(), complaints.len(), allowed.complete), (1, 2, false), "it cannot be read now");
        assert!(complaints[1].contains("a.json cannot be read") && complaints[1].contains("until"));
        fs::remove_dir_all(folder.0.join(ALLOWED)).unwrap();
        assert!(allowed.read(&mut |_| ()).is_err() && allowed.stamp().is_err(), "what was granted stays so");
    }

    #[test]
    fn what_cannot_be_read_keeps_no_other_from_being_removed() {
        let folder = Folder::new("broken");
        folder.allow("a.json", "a", 0, "");
        folder.allow("b.json", "b", 1, "");
        let PublisherKeys { by_key, mut allowed, .. } = PublisherKeys::read(&folder.0).unwrap();
        folder.break_it("a.json"); // before the first read after the start
        folder.break_it("c.json");
        let mut complaints = Vec::new();
        let mut look = || allowed.read(&mut |error| complaints.push(error.to_string())).unwrap();
        assert_eq!(look(), by_key);
        fs::remove_file(folder.0.join("allowed/b.json")).unwrap();
        assert_eq!(look().keys().collect::<Vec<_>>(), [PUBLIC[0]]);
        fs::rename(folder.0.join("allowed/a.json"), folder.0.join("allowed/c.json")).unwrap();
        assert!(look().is_empty(), "what lies there now, nobody knows");
        let told = |file: &str| complaints.iter().filter(|text| text.contains(file)).count();
        assert_eq!((told("a.json"), told("c.json")), (2, 3));
    }

    #[test]
    fn of_too_many_files_those_count_that_did_before() {
        let folder = Folder::new("many");
        folder.allow("a.json", "a", 0, "");
        folder.allow("b.json", "b", 1, "");
        let mut allowed = PublisherKeys::read(&folder.0).unwrap().allowed;
        let before = allowed.stamp().unwrap();
        for i in 0..KEYS_MAX {
            folder.write(&format!("allowed/{}.json", i), "", 0o644);
        }
        assert!(allowed.stamp().unwrap() != before);
        fs::remove_file(folder.0.join("allowed/b.json")).unwrap();
        let mut complaints = Vec::new();
        let found = allowed.read(&mut |error| complaints.push(error.to_string())).unwrap();
        assert_eq!((found.len(), complaints.len()), (1, 1), "{:?}", complaints);
        assert!(complaints[0].contains("at most") && folder.error().contains("at most"));
    }

    #[test]
    fn a_pipe_keeps_nobody_waiting() {
        let folder = Folder::new("pipe");
        folder.allow("b.json", "b", 0, "");
        let pipe = folder.0.join("allowed/a.json");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut complaints = Vec::new();
        let found = Allowed::new(&folder.0).read(&mut |error| complaints.push(error.to_string())).unwrap();
        assert_eq!((found.len(), complaints.len()), (1, 1), "{:?}", complaints);
    }
}
