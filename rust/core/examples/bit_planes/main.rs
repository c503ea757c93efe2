//! Measures table look-up over bit planes (T-MAC) of any width for codebook weights beside the product's kernels, which
//! look centroids up by byte shuffles, but for 2 bits with AVX2, where they look activations up as well, in tiles of 16
//! rows instead of 32: one token, one thread, a codebook a row.
//!
//! ```text
//! cargo run --release -p moepack-core --example bit_planes [RESULTS.json]
//! ```
//!
//! Both round activations to 8 bits. The planes' sums are exact, as those of the mode `int16`; `int8` rounds centroids.
//! Times include the rounding of the token and the planes' tables. Only x86 has kernels.

#![cfg_attr(not(target_arch = "x86_64"), allow(unused))]

#[cfg(target_arch = "x86_64")]
mod kernel;
mod planes;

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use moepack_core::formats::codebook::{Content, MAX_CENTROID, View, encode};
use moepack_core::gemm::codebook::Codebook;
use moepack_core::gemm::matmul;
use moepack_core::pool;
use moepack_core::simd::Isa;
use moepack_core::types::{Mode, Shape};
use planes::{Planes, Rows, Token};
use rayon::ThreadPool;
use serde_json::{Value, json};

/// Rows, columns, and the bytes that copies of the weights fill.
const CASES: [(usize, usize, usize); 2] = [(14336, 4096, 320 << 20), (768, 2048, 1)];

/// Timed products of each kernel; the median counts.
const RUNS: usize = 90;

fn main() -> Result<(), Box<dyn Error>> {
    pool::set_threads(1)?;
    let pool = pool::current()?;
    let mut figures = Vec::new();
    println!(
        "rows x columns, bits, set: microseconds (10^9 weights/s) of planes, product int16, product int8"
    );
    for (rows, columns, resident) in CASES {
        for bits in [2, 3, 4] {
            let source = random(bits, rows, columns);
            for isa in [Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.available()) {
                let figure = pool.install(|| measure(&source, isa, resident, &pool))?;
                figures.push(figure);
            }
        }
    }
    if let Some(path) = std::env::args().nth(1) {
        let command = "cargo run --release -p moepack-core --example bit_planes";
        let machine = json!({"processor": processor(), "threads": 1});
        let results = json!({"command": command, "machine": machine, "tokens": 1, "figures": figures});
        std::fs::write(path, serde_json::to_string_pretty(&results)? + "\n")?;
    }
    Ok(())
}

/// The processor's name.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name"));
    name.map_or("unknown", |name| name.trim_start_matches([' ', '\t', ':']))
        .into()
}

/// Pseudo-random codes and centroids, by a congruential generator.
fn random(bits: usize, rows: usize, columns: usize) -> Rows {
    let mut state = bits as u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let top = i32::from(MAX_CENTROID);
    Rows {
        bits,
        rows,
        columns,
        codes: (0..rows * columns)
            .map(|_| (next() >> 4) as u8 & ((1 << bits) - 1))
            .collect(),
        centroids: (0..rows << bits)
            .map(|_| (next() as i32 % (2 * top + 1) - top) as i16)
            .collect(),
        scales: (0..rows).map(|_| (1 + next() % 1000) as f32 / 1e6).collect(),
    }
}

/// Copies that fill `resident` bytes together, one at least.
fn copies<T: Clone>(first: T, bytes: usize, resident: usize) -> Vec<T> {
    vec![first; resident.div_ceil(bytes)]
}

/// Checks and times a shape with a set of instructions.
fn measure(source: &Rows, isa: Isa, resident: usize, pool: &ThreadPool) -> moepack_core::Result<Value> {
    let x: Vec<f32> = (0..source.columns)
        .map(|i| (i * 7919 % 1009) as f32 / 504.0 - 0.7)
        .collect();
    let mut y = vec![0.0; source.rows];
    let packed = Planes::new(source, if isa == Isa::Avx2 { 32 } else { 64 }, pool);
    let blob = blob(source, pool)?;
    by_planes(&packed, &x, isa, &mut y);
    check(source, &x, &y);
    let bytes = [packed.bytes(), blob.len()];
    let (packed, blobs) = (
        copies(packed, bytes[0], resident),
        copies(blob, bytes[1], resident),
    );
    let views = blobs
        .iter()
        .map(|blob| View::parse(blob))
        .collect::<Result<Vec<_>, _>>()?;
    let mut times = [const { Vec::new() }; 3];
    let batch = if resident > 1 { packed.len() } else { RUNS / 6 };
    for _ in 0..RUNS.div_ceil(batch) {
        for run in 0..batch {
            times[0].push(time(&mut y, |y| {
                by_planes(&packed[run % packed.len()], &x, isa, y)
            }));
        }
        for (times, mode) in times[1..].iter_mut().zip([Mode::Int16, Mode::Int8]) {
            for run in 0..batch {
                let weights = Codebook::new(views[run % views.len()], mode, isa)?;
                let mut product = Ok(());
                let call = |y: &mut [f32]| product = matmul(&weights, 0, &x[..], 1, y, pool);
                times.push(time(&mut y, call));
                product?;
            }
        }
    }
    Ok(report(source, isa, bytes, times.map(median)))
}

/// Prints a line and returns it.
fn report(source: &Rows, isa: Isa, bytes: [usize; 2], micros: [f64; 3]) -> Value {
    let Rows {
        bits, rows, columns, ..
    } = *source;
    let speeds = micros.map(|micros| (rows * columns) as f64 / micros / 1e3);
    let cells: Vec<String> = micros
        .iter()
        .zip(speeds)
        .map(|(t, s)| format!("{t:.0} ({s:.1})"))
        .collect();
    println!("{rows}x{columns} {bits} {}: {}", isa.name(), cells.join(", "));
    let figure =
        |i: usize| json!({"microseconds": micros[i], "weights_per_ns": speeds[i], "bytes": bytes[i.min(1)]});
    json!({
        "rows": rows, "columns": columns, "bits": bits, "isa": isa.name(),
        "planes": figure(0), "product int16": figure(1), "product int8": figure(2),
    })
}

/// The tensor as the product packs it.
fn blob(source: &Rows, pool: &ThreadPool) -> moepack_core::Result<Vec<u8>> {
    let shape = Shape {
        experts: 1,
        rows: source.rows,
        columns: source.columns,
        ndim: 2,
    };
    let content = Content {
        shape,
        bits: source.bits as u8,
        activation_bits: 8,
        block: source.columns,
        hadamard: 1,
        codes: &source.codes,
        centroids: &source.centroids,
        scales: &source.scales,
    };
    encode(content, pool)
}

/// y = W x by bit planes.
fn by_planes(weights: &Planes, x: &[f32], isa: Isa, y: &mut [f32]) {
    let token = Token::new(x);
    match isa {
        // SAFETY: the processor has been asked for the set; the planes are packed for it.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { kernel::avx2(weights, &token, y) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { kernel::avx512(weights, &token, y) },
        _ => unreachable!("no kernel for {}", isa.name()),
    }
}

/// Panics unless `y` is the naive product by the rounded token but for rounding of the last sums in f32.
///
/// With the sum of |w| and the token's whole range as measure, 17 terms err by less than 1e-5, and a wrong code by more.
fn check(source: &Rows, x: &[f32], y: &[f32]) {
    let token = Token::new(x);
    for (row, &found) in y.iter().enumerate() {
        let codes = &source.codes[row * source.columns..][..source.columns];
        let (mut product, mut size) = (0.0, 0.0);
        for (&code, &q) in codes.iter().zip(&token.codes) {
            let weight = source.weight(row, code.into());
            product += weight * (f64::from(q) - f64::from(token.zero));
            size += weight.abs();
        }
        let (product, size) = (product * f64::from(token.step), size * f64::from(token.step));
        let error = (f64::from(found) - product).abs();
        assert!(error <= 1e-5 * 255.0 * size, "row {row}: {found}, not {product}");
    }
}

/// Microseconds of a call that writes `y`.
fn time(y: &mut [f32], call: impl FnOnce(&mut [f32])) -> f64 {
    let start = Instant::now();
    call(y);
    black_box(y);
    start.elapsed().as_secs_f64() * 1e6
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
