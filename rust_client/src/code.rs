//! Codes of the protocol (section 13), for programs. The texts that are sent with codes are for
//! people.

use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a version was rejected, or a worker was refused.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* $name,)*
            /// A code that this crate does not know: later versions of the protocol may add codes.
            Other(String),
        }

        impl Code {
            /// Returns the code as it is in messages.
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
    /// The layout breaks a rule, or differs from the announced one.
    LayoutInvalid = "layout-invalid",
    /// The model here has other names, shapes or dtypes.
    LayoutMismatch = "layout-mismatch",
    /// The worker does not support the version's encoding or encryption.
    Unsupported = "unsupported",
    /// The version has more bytes than this worker accepts.
    TooLarge = "too-large",
    /// The version has more chunks than allowed.
    TooManyChunks = "too-many-chunks",
    /// There is not enough memory now.
    NoMemory = "no-memory",
    /// The received version did not match its digest, three times.
    DigestMismatch = "digest-mismatch",
    /// The version could not be applied.
    Apply = "apply",
    /// Another living worker has this name.
    NameTaken = "name-taken",
    /// The worker or the publisher has weights of a later publisher.
    StaleEpoch = "stale-epoch",
    /// The publisher accepts no more workers.
    Limit = "limit",
    /// The publisher speaks another protocol version.
    ProtocolVersion = "protocol-version",
    /// A handshake failed because of keys; the text gives the most likely reason.
    Keys = "keys",
    /// The worker's key is for another name.
    WrongName = "wrong-name",
    /// The key does not permit this.
    NotAllowed = "not-allowed",
    /// The worker's key was revoked.
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
