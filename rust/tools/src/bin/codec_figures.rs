//! Measures the ternary codes on independent weights: ratio to bf16 with all metadata, and speed of one thread.
//!
//! ```text
//! cargo run --release -p moepack-tools --bin codec_figures [P0]
//! ```

use std::error::Error;
use std::time::Instant;

use moepack_core::formats::ternary::{self, Code, TernaryView};
use moepack_core::pool;
use moepack_core::types::Shape;

/// The shapes of the two matrices of an expert of SwitchTransformers c2048.
const SHAPES: [(usize, usize); 2] = [(2080, 6144), (6144, 2080)];

/// The number of runs; the fastest counts ...
const RUNS: usize = 300;

/// ... and the number of rows: short runs find quiet moments even on a busy machine.
const TIMED_ROWS: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let p0 = std::env::args().nth(1).map_or(Ok(0.885), |p0| p0.parse())?;
    pool::set_threads(1)?;
    for code in Code::ALL {
        let (mut plain, mut packed) = (0, 0);
        for (rows, columns) in SHAPES {
            let codes = iid(rows * columns, p0);
            let shape = Shape {
                experts: 1,
                rows,
                columns,
                ndim: 2,
            };
            let bytes = measure(&codes, shape, code)?;
            plain += 2 * codes.len();
            packed += bytes;
        }
        println!(
            "{} both shapes: {:.3}x of bf16",
            code.name(),
            plain as f64 / packed as f64
        );
    }
    Ok(())
}

/// Independent weights, the two signs equally likely.
fn iid(n: usize, p0: f64) -> Vec<i8> {
    let mut state = 1u64;
    let zero_below = (p0 * 2f64.powi(32)) as u64;
    let positive_below = ((1.0 + p0) / 2.0 * 2f64.powi(32)) as u64;
    let draw = |_| {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        match (z ^ z >> 31) >> 32 {
            u if u < zero_below => 0,
            u if u < positive_below => 1,
            _ => -1,
        }
    };
    (0..n).map(draw).collect()
}

/// Prints the figures of one matrix and returns its packed size in bytes.
fn measure(codes: &[i8], shape: Shape, code: Code) -> Result<usize, Box<dyn Error>> {
    let blob = ternary::encode(
        codes,
        &vec![(-0.5, 0.5); shape.rows],
        shape,
        code,
        &*pool::current()?,
    )?;
    println!(
        "{:6} {}x{}: {:.3}x of bf16, dictionaries {:?}; {}",
        code.name(),
        shape.rows,
        shape.columns,
        2.0 * codes.len() as f64 / blob.len() as f64,
        TernaryView::parse(&blob)?.dictionaries(),
        speeds(
            &codes[..TIMED_ROWS * shape.columns],
            Shape {
                rows: TIMED_ROWS,
                ..shape
            },
            code
        )?
    );
    Ok(blob.len())
}

/// The speeds for some rows, as text.
fn speeds(codes: &[i8], shape: Shape, code: Code) -> Result<String, Box<dyn Error>> {
    let pool = pool::current()?;
    let levels = vec![(-0.5, 0.5); shape.rows];
    let (blob, encoding) = best_of(RUNS, || ternary::encode(codes, &levels, shape, code, &pool))?;
    let (view, _) = best_of(1, || TernaryView::parse(&blob))?;
    let ((), verifying) = best_of(RUNS, || view.verify(&pool))?;
    let mut out = vec![0; codes.len()];
    let ((), decoding) = best_of(RUNS, || ternary::decode_codes(&view, &mut out, &pool))?;
    assert!(out == codes);
    let speed = |seconds: f64| format!("{:.3}", codes.len() as f64 / seconds / 1e9);
    let [encode, decode, verify] = [encoding, decoding, verifying].map(speed);
    Ok(format!(
        "10^9 weights/s per thread: encode {encode}, decode {decode}, verify {verify}"
    ))
}

/// The result of the last of several runs, and the shortest time of all in seconds.
fn best_of<T>(
    runs: usize,
    mut run: impl FnMut() -> moepack_core::Result<T>,
) -> moepack_core::Result<(T, f64)> {
    let mut timed = || {
        let start = Instant::now();
        run().map(|result| (result, start.elapsed().as_secs_f64()))
    };
    let (mut result, mut best) = timed()?;
    for _ in 1..runs {
        let (next, seconds) = timed()?;
        (result, best) = (next, best.min(seconds));
    }
    Ok((result, best))
}
