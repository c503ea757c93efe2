//! Creates FSV8 dictionaries and the compact file that the library embeds.
//!
//! ```text
//! cargo run --release -p moepack-tools --bin fsv8_dictionaries -- search 0.885 0.5       # JSON on standard output
//! cargo run --release -p moepack-tools --bin fsv8_dictionaries -- unpack > all.json      # the embedded ones
//! cargo run --release -p moepack-tools --bin fsv8_dictionaries -- pack all.json dictionaries.bin
//! ```
//!
//! The embedded file is rust/core/src/formats/ternary/fsv8/dictionaries.bin. Packed tensors refer to its dictionaries
//! by index, so dictionaries may be appended but never changed.

use std::error::Error;
use std::time::Instant;

use moepack_core::formats::ternary::fsv8::Dictionary;
use moepack_tools::fsv8::search::{Goal, search};
use moepack_tools::fsv8::{json, write_all};

const USAGE: &str = "usage: fsv8_dictionaries search P0 SHARE [EFFORT] | unpack | pack JSON BIN";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["search", p0, share] => find(p0, share, "60"),
        ["search", p0, share, effort] => find(p0, share, effort),
        ["unpack"] => {
            println!("{}", json::write(Dictionary::all()));
            Ok(())
        }
        ["pack", input, output] => {
            let dictionaries = json::read(&std::fs::read_to_string(input)?).ok_or("malformed JSON")?;
            Ok(std::fs::write(output, write_all(&dictionaries))?)
        }
        _ => Err(USAGE.into()),
    }
}

fn find(p0: &str, share: &str, effort: &str) -> Result<(), Box<dyn Error>> {
    let thousandths = |text: &str| text.parse().map(|x: f64| (x * 1e3).round() as u16);
    let p0_thousandths = thousandths(p0)?;
    // Words of three non-zeros need shorter positions, which suffice below this share of zeros.
    let max_nonzeros = if p0_thousandths < 810 { 3 } else { 2 };
    let goal = Goal {
        p0_thousandths,
        share_thousandths: thousandths(share)?,
        max_nonzeros,
        effort: effort.parse()?,
        seed: 1,
    };
    let start = Instant::now();
    let found = search(&goal)?;
    println!("{}", json::write(std::slice::from_ref(&found)));
    let entropy: f64 = found.probabilities().iter().map(|p| -p * p.log2()).sum();
    let expected = f64::from(found.expected_length) / 1e4;
    eprintln!(
        "{expected:.4} weights per code, {:.3} % of the Shannon limit, in {:.1} s",
        100.0 * expected * entropy / 8.0,
        start.elapsed().as_secs_f64()
    );
    if let Some(embedded) = Dictionary::all()
        .iter()
        .find(|d| (d.p0_thousandths, d.share_thousandths) == (goal.p0_thousandths, goal.share_thousandths))
    {
        let ratio = f64::from(found.expected_length) / f64::from(embedded.expected_length);
        eprintln!(
            "{:.4} of the embedded dictionary's {:.4}",
            ratio,
            f64::from(embedded.expected_length) / 1e4
        );
    }
    Ok(())
}
