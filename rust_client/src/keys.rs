//! Reads a worker's keys from a file of `weightbus keygen`: one small JSON object. A publisher's
//! keys are in `publisher/keys.rs`.

use crate::curve;
use crate::error::Error;
use crate::fields::{text, Fault, Fields};
use crate::json::Value;
use crate::limits::{NAME_MAX, TEXT_MAX};
use crate::sealing;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The keys with which a worker connects to exactly one publisher.
#[derive(Clone, PartialEq)]
pub struct WorkerKeys {
    name: String,
    pub(crate) public: String, // 40 characters of Z85, like the next two fields
    pub(crate) secret: String,
    pub(crate) publisher: String,
}

impl fmt::Debug for WorkerKeys {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "WorkerKeys({} {} of the publisher {})", self.name, self.public, self.publisher)
    }
}

impl WorkerKeys {
    /// Reads a worker's key file. If `path` is a folder that `weightbus keygen` has made, reads the
    /// file for `name`; without a name, the only file.
    pub fn read(path: impl AsRef<Path>, name: Option<&str>) -> Result<WorkerKeys, Error> {
        check_curve()?;
        let path = path.as_ref();
        check_path(path)?;
        let file = if path.is_dir() { file_of(&path.join("workers"), name)? } else { path.to_owned() };
        let json = read(&file, true).map_err(Unread::error)?;
        parse(&json, &file.display().to_string())
    }

    /// Reads the key file of each of `count` addresses, or the one file or folder for all. The
    /// paths are separated by commas; an empty path stands for no keys.
    pub(crate) fn read_all(path: &Path, name: Option<&str>, count: usize) -> Result<Vec<WorkerKeys>, Error> {
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        if count == 1 || !bytes.contains(&b',') || path.exists() || check_path(path).is_err() {
            return Ok(vec![WorkerKeys::read(path, name)?]);
        }
        let paths = bytes.split(|&byte| byte == b',').map(|path| Path::new(OsStr::from_bytes(path)));
        paths.map(|path| WorkerKeys::read(path, name)).collect()
    }

    /// Parses the content of a worker's key file, for users who store secrets in another way.
    pub fn from_json(json: &str) -> Result<WorkerKeys, Error> {
        check_curve()?;
        parse(json.as_bytes(), "the given text")
    }

    /// Returns the worker's name; a `*` in it stands for any characters.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn parse(json: &[u8], whose: &str) -> Result<WorkerKeys, Error> {
    let keys = object_of(json, whose, |fields| {
        Ok(WorkerKeys {
            name: name_in(fields)?,
            public: key_in(fields, "public")?,
            secret: key_in(fields, "secret")?,
            publisher: key_in(fields, "publisher")?,
        })
    })?;
    check_pair(&keys.public, &keys.secret, whose)?;
    Ok(keys)
}

/// Returns an error if `path` is the content of a key file instead of a path. The error text does
/// not contain the content, since that is secret.
pub(crate) fn check_path(path: &Path) -> Result<(), Error> {
    if path.to_string_lossy().trim_start().starts_with('{') {
        let text =
            "keys: the path of a file is expected, not its content (WorkerKeys::from_json accepts the content)";
        return Err(Error::Keys(text.to_owned()));
    }
    Ok(())
}

/// Why a file could not be used.
pub(crate) enum Unread {
    /// The file does not exist, or is invalid.
    Odd(Error),
    /// The file exists, but cannot be read now: its content is unknown.
    Unreadable(Error),
}

impl Unread {
    pub(crate) fn error(self) -> Error {
        match self {
            Unread::Odd(error) | Unread::Unreadable(error) => error,
        }
    }
}

/// Returns the content of a key file. If the file is `secret`, fails if all users can access it. If
/// not, reading never blocks, even on a pipe.
pub(crate) fn read(file: &Path, secret: bool) -> Result<Vec<u8>, Unread> {
    let unread = |error: io::Error| {
        let gone = error.kind() == io::ErrorKind::NotFound;
        let error = Error::Keys(format!("{} cannot be read: {}", file.display(), error));
        if gone {
            Unread::Odd(error)
        } else {
            Unread::Unreadable(error)
        }
    };
    let flags = if secret { 0 } else { libc::O_NONBLOCK };
    let opened = fs::OpenOptions::new().read(true).custom_flags(flags).open(file).map_err(unread)?;
    if secret && opened.metadata().map_err(unread)?.permissions().mode() & 0o007 != 0 {
        let text = format!("{0} is open to every user of this host: chmod 600 {0}", file.display());
        return Err(Unread::Odd(Error::Keys(text)));
    }
    let mut json = Vec::new();
    opened.take(TEXT_MAX as u64).read_to_end(&mut json).map_err(unread)?;
    Ok(json)
}

/// Parses the object in a key file. `whose` names the file in errors.
pub(crate) fn object_of<T>(
    json: &[u8],
    whose: &str,
    fields_of: impl FnOnce(&Fields) -> Result<T, Fault>,
) -> Result<T, Error> {
    let odd = |text: &str| {
        Error::Keys(format!("{} is not a key file: {}; see weightbus keygen --help", whose, text))
    };
    match serde_json::from_slice(json) {
        Ok(Value::Object(object)) => fields_of(&Fields(&object)).map_err(|fault| odd(&fault)),
        Ok(other) => Err(odd(&format!("it is {}, not an object", other.kind()))),
        Err(error) => Err(odd(&error.to_string())),
    }
}

pub(crate) fn check_pair(public: &str, secret: &str, whose: &str) -> Result<(), Error> {
    if curve::public_of(secret).as_deref() == Some(public) {
        return Ok(());
    }
    let text = "public and secret key do not belong together; make a new pair";
    Err(Error::Keys(format!("{}: {}", whose, text)))
}

pub(crate) fn name_in(fields: &Fields) -> Result<String, Fault> {
    let name = fields.required("name", text(NAME_MAX))?;
    if is_pattern(&name) {
        Ok(name)
    } else {
        Err("\"name\" is not a name; it may contain one *".to_owned())
    }
}

pub(crate) fn key_in(fields: &Fields, field: &str) -> Result<String, Fault> {
    let key = fields.required(field, text(TEXT_MAX))?;
    if is_z85(&key) {
        Ok(key)
    } else {
        Err(format!("{:?} must be 40 characters of Z85", field))
    }
}

const Z85: &str = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

/// True if a text encodes 32 bytes in Z85. Five characters encode four bytes; some combinations of
/// five exceed 32 bits.
fn is_z85(key: &str) -> bool {
    let digit = |c| Z85.bytes().position(|digit| digit == c).map(|value| value as u64);
    let word = |five: &[u8]| five.iter().try_fold(0, |word, &c| Some(85 * word + digit(c)?));
    key.len() == 40 && key.as_bytes().chunks(5).all(|five| word(five).map_or(false, |word| word < 1 << 32))
}

/// True if a text is a name, or a name in which a `*` stands for any characters.
fn is_pattern(text: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-' | b'*');
    let stars = text.bytes().filter(|&c| c == b'*').count();
    (1..=NAME_MAX).contains(&text.len()) && stars <= 1 && text.bytes().all(plain)
}

/// True if a key for this pattern may be used under this name.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        Some((begin, end)) => {
            name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
        }
        None => name == pattern,
    }
}

/// Returns the key file in a folder for a worker of this name; without a name, the only file.
fn file_of(folder: &Path, name: Option<&str>) -> Result<PathBuf, Error> {
    let unreadable =
        |error: io::Error| Error::Keys(format!("{} cannot be read: {}", folder.display(), error));
    let mut patterns = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.path();
        let stem = file.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"));
        if let Some(pattern) = stem.filter(|stem| !stem.is_empty()).map(|stem| stem.replace('+', "*")) {
            patterns.push((pattern, file));
        }
    }
    patterns.sort();
    let fitting: Vec<_> =
        patterns.iter().filter(|(pattern, _)| name.map_or(true, |name| fits(pattern, name))).collect();
    let exact = patterns.iter().find(|(pattern, _)| Some(&pattern[..]) == name);
    match (exact, &fitting[..]) {
        (Some((_, file)), _) | (None, [(_, file)]) => Ok(file.clone()),
        _ => Err(Error::Keys(format!(
            "{} has {} files for {} ({} in all): give keys one file, or the name of the worker that it is for; \
             weightbus keygen makes more",
            folder.display(),
            fitting.len(),
            name.unwrap_or("a worker without a name"),
            patterns.len()
        ))),
    }
}

/// Returns an error if this crate was built without keys.
pub(crate) fn check_curve() -> Result<(), Error> {
    if !sealing::AVAILABLE {
        return Err(Error::Keys(
            "this weightbus was built without keys: build it with the feature \"keys\", which is on by default, \
             or start it without keys"
                .to_owned(),
        ));
    }
    Ok(())
}

#[cfg(all(test, feature = "keys"))]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    // Key pairs of libzmq's documentation.
    const GOOD: &str = r#"{"name": "w", "public": "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID",
        "secret": "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs", "publisher": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
        "later": ["fields"]}"#;
    const OTHER: &str = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6";

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("weightbus-{}-{}", name, std::process::id()));
            fs::create_dir_all(path.join("workers")).unwrap();
            Folder(path)
        }

        fn write(&self, file: &str, json: &str, mode: u32) -> PathBuf {
            let path = self.0.join("workers").join(file);
            let mut opened = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(mode)
                .open(&path)
                .unwrap();
            opened.write_all(json.as_bytes()).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn words(result: Result<WorkerKeys, Error>) -> String {
        let words = result.unwrap_err().to_string();
        assert!(!words.contains("D:)Q"), "a secret: {}", words);
        words
    }

    #[test]
    fn what_makes_no_sense_is_told_without_a_secret() {
        let keys = WorkerKeys::from_json(GOOD).unwrap();
        assert_eq!(keys.name(), "w");
        assert!(!format!("{:?}", keys).contains("D:)Q"));
        for (from, to, why) in [
            ("D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs", OTHER, "do not belong together"),
            ("hID\"", "hI\"", "40 characters"),
            ("hID\"", "hI~\"", "40 characters"),
            ("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", &"#".repeat(40), "40 characters"),
            ("\"w\"", "\"a*b*\"", "is not a name"),
            ("\"publisher\"", "\"public\"", "occurs twice"),
            ("\"publisher\"", "\"else\"", "is missing"),
            ("{", "[", "is not a key file"),
        ] {
            let told = words(WorkerKeys::from_json(&GOOD.replacen(from, to, 1)));
            assert!(told.contains(why), "{}", told);
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let folder = Folder::new("keys-mode");
        let file = folder.write("w.json", GOOD, 0o604);
        assert!(words(WorkerKeys::read(&file, None)).contains("chmod 600"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(WorkerKeys::read(&file, None).is_ok());
        assert!(words(WorkerKeys::read(folder.0.join("nobody"), None)).contains("cannot be read"));
        for text in [GOOD.to_owned(), format!("\n{}", GOOD)] {
            assert!(words(WorkerKeys::read(text, None)).contains("the path of a file"));
        }
    }

    #[test]
    fn a_folder_has_a_file_for_each_name() {
        let folder = Folder::new("keys-names");
        let read = |name| WorkerKeys::read(&folder.0, name).map(|keys| keys.name().to_owned());
        folder.write("w.json", GOOD, 0o600);
        assert_eq!(read(None).unwrap(), "w");
        folder.write("gpu-+.json", &GOOD.replace("\"w\"", "\"gpu-*\""), 0o600);
        folder.write("gpu-7.json", &GOOD.replace("\"w\"", "\"gpu-7\""), 0o600);
        for (name, found) in [("w", "w"), ("gpu-1", "gpu-*"), ("gpu-7", "gpu-7")] {
            assert_eq!(read(Some(name)).unwrap(), found);
        }
        assert!(read(None).unwrap_err().to_string().contains("has 3 files"));
        assert!(read(Some("nobody")).unwrap_err().to_string().contains("has 0 files"));
    }
}
