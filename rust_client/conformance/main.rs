//! The driver that the conformance suite runs: it plays the golden vectors, or runs a worker or a publisher
//! that prints its events as JSON.

mod encoding;
mod follow;
mod memfd;
mod publish;
mod sequences;
mod vectors;

use follow::Options;
use std::error::Error;
use std::path::Path;
use std::process::exit;

const USAGE: &str = "usage: driver vectors DIR | driver encoding DIR | driver worker ADDRESS --name NAME \
--models M1,M2 [--in-place SPEC.json] [--no-tensors] [--bytes-max N] [--network] [--seconds S] [--turn-down N,...] \
[--break N,...] [--apply-seconds S[:N,...]] [--apply-timeout S] [--partial] [--cast] \
[--keys FILE] | driver publisher ADDRESS [--data ADDRESS] [--advertise ADDRESS] [--epoch N] \
[--chunk-bytes N] [--ping S --lost-after S] [--state FOLDER] [--keys FOLDER] [--rekey S] [--insecure]";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.split_first() {
        Some((command, rest)) if command == "vectors" && rest.len() == 1 => run_vectors(Path::new(&rest[0])),
        Some((command, rest)) if command == "encoding" && rest.len() == 1 => encoding::run(&rest[0]),
        Some((command, rest)) if command == "publisher" => publish::serve(rest, USAGE),
        Some((command, rest)) if command == "worker" => options(rest).and_then(follow::follow),
        _ => Err(USAGE.into()),
    };
    if let Err(error) = result {
        eprintln!("{}", error);
        exit(2);
    }
}

/// Prints this client's answer to each golden vector.
fn run_vectors(folder: &Path) -> Result<(), Box<dyn Error>> {
    for (file, name, _case, answer) in vectors::answers(folder)? {
        if let Some(mut row) = answer {
            row["file"] = file.into();
            row["case"] = name.into();
            println!("{}", row);
        }
    }
    Ok(())
}

fn options(arguments: &[String]) -> Result<Options, Box<dyn Error>> {
    let mut options = Options {
        address: String::new(),
        name: String::new(),
        models: Vec::new(),
        in_place: None,
        tensors: true,
        bytes_max: None,
        network: false,
        seconds: 120.0,
        reject_versions: Vec::new(),
        fail_versions: Vec::new(),
        apply_seconds: (0.0, None),
        apply_timeout: None,
        partial: false,
        cast: false,
        keys: None,
    };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().cloned().ok_or(USAGE);
        match argument.as_str() {
            "--name" => options.name = value()?,
            "--models" => options.models = value()?.split(',').map(str::to_owned).collect(),
            "--in-place" => options.in_place = Some(value()?),
            "--no-tensors" => options.tensors = false,
            "--bytes-max" => options.bytes_max = Some(value()?.parse()?),
            "--network" => options.network = true,
            "--seconds" => options.seconds = value()?.parse()?,
            "--turn-down" => options.reject_versions = numbers(&value()?)?,
            "--break" => options.fail_versions = numbers(&value()?)?,
            "--apply-seconds" => {
                let value = value()?;
                let (seconds, which) =
                    value.split_once(':').map_or((&value[..], None), |(s, n)| (s, Some(n)));
                options.apply_seconds = (seconds.parse()?, which.map(numbers).transpose()?);
            }
            "--apply-timeout" => options.apply_timeout = Some(value()?.parse()?),
            "--partial" => options.partial = true,
            "--cast" => options.cast = true,
            "--keys" => options.keys = Some(value()?),
            _ if options.address.is_empty() => options.address = argument.clone(),
            _ => return Err(USAGE.into()),
        }
    }
    if options.address.is_empty() || options.name.is_empty() || options.models.is_empty() {
        return Err(USAGE.into());
    }
    Ok(options)
}

fn numbers(list: &str) -> Result<Vec<u64>, std::num::ParseIntError> {
    list.split(',').map(str::parse).collect()
}
