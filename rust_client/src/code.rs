//! Codes of the protocol (section 13), for programs; the texts beside them are for people.

use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a version was not taken, or a worker was refused.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* $name,)*
            /// One that this crate does not know: new ones may come at any time.
            Other(String),
        }

        impl Code {
            /// The code as it stands in messages.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Code::$name => $text,)*
                    Code::Other(text) => text,
                }
            }
        }

        impl From<&str> for Code {
            fn from(text: &str) -> Code {
                match text {
                    $($text => Code::$name,)*
                    other => Code::Other(other.to_owned()),
                }
            }
        }
    };
}

codes! {
    /// The layout breaks a rule, or is not what was announced.
    LayoutInvalid = "layout-invalid",
    /// The model here has other names, shapes or dtypes.
    LayoutMismatch = "layout-mismatch",
    /// An encoding or encryption that this worker does not know.
    Unsupported = "unsupported",
    /// More bytes than this worker takes.
    TooLarge = "too-large",
    /// More chunks than a version may have.
    TooManyChunks = "too-many-chunks",
    /// There is no memory for it now.
    NoMemory = "no-memory",
    /// The whole did not match its digest, three times.
    DigestMismatch = "digest-mismatch",
    /// It failed to be applied.
    Apply = "apply",
    /// Another living worker has the name.
    NameTaken = "name-taken",
    /// One of the two has weights of a later publisher.
    StaleEpoch = "stale-epoch",
    /// The publisher has no room for another worker.
    Limit = "limit",
    /// The publisher speaks another protocol.
    ProtocolVersion = "protocol-version",
    /// Keys keep the two sides apart; the text says which most likely do.
    Keys = "keys",
    /// The worker's key is for another name.
    WrongName = "wrong-name",
    /// The key is not for this.
    NotAllowed = "not-allowed",
    /// The worker's key is not allowed any more.
    Revoked = "revoked",
    /// A message breaks the protocol, which is a bug.
    Malformed = "malformed",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::Code;

    #[test]
    fn codes_are_those_of_messages() {
        assert_eq!(Code::from("layout-mismatch"), Code::LayoutMismatch);
        assert_eq!(Code::LayoutMismatch.to_string(), "layout-mismatch");
        assert_eq!(Code::from("zukunft"), Code::Other("zukunft".to_owned()));
        assert_eq!(Code::from("zukunft").as_str(), "zukunft");
    }
}
