//! Benchmarks of ternary tensors: products by every kernel, encoding and decoding, in weights per second (divan's
//! items).
//!
//! `cargo bench -p moepack-core --bench ternary -- [filter]`. Weights are cold: products cycle through copies of the
//! tensor that fill 600 MB together. Rows are independent weights with P(0) = 0.885; one thread.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use moepack_core::formats::ternary::{Code, TernaryView, decode_codes, encode};
use moepack_core::gemm::matmul;
use moepack_core::gemm::ternary::{Kernel, Ternary};
use moepack_core::types::Shape;
use rayon::{ThreadPool, ThreadPoolBuilder};

fn main() {
    divan::main();
}

/// The total bytes of the copies of a tensor.
const COLD: usize = 600_000_000;

/// The shapes of the published figures: rows x columns.
const SHAPES: [(usize, usize); 3] = [(6144, 2080), (2080, 6144), (3072, 768)];

#[derive(Clone, Copy)]
struct Case {
    kernel: Kernel,
    code: Code,
    rows: usize,
    columns: usize,
    tokens: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (kernel, code) = (self.kernel.name(), self.code.name());
        let (rows, columns, tokens) = (self.rows, self.columns, self.tokens);
        write!(f, "{code} {rows}x{columns} {tokens:>3} tokens {kernel}")
    }
}

fn cases(code: Code, tokens: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, columns) in SHAPES {
        for &tokens in tokens {
            let kernels = Kernel::all_available();
            cases.extend(kernels.map(|kernel| Case {
                kernel,
                code,
                rows,
                columns,
                tokens,
            }));
        }
    }
    cases
}

fn pool() -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(1).build().unwrap()
}

/// A random number generator: splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

fn weights(rows: usize, columns: usize) -> (Vec<i8>, Vec<(f32, f32)>, Shape) {
    let mut state = 1;
    let mut weight = || match random(&mut state) >> 54 {
        // 118 of 1024 weights are not zero: P(0) = 0.885.
        0..59 => -1,
        59..118 => 1,
        _ => 0,
    };
    let codes = (0..rows * columns).map(|_| weight()).collect();
    let levels = (0..rows).map(|row| (-0.5 - (row % 3) as f32, 0.75)).collect();
    let shape = Shape {
        experts: 1,
        rows,
        columns,
        ndim: 2,
    };
    (codes, levels, shape)
}

/// Copies of a packed tensor, each aligned to 64 bytes.
struct Copies {
    key: (Code, usize, usize),
    bytes: Vec<u8>,
    first: usize,
    size: usize,
}

impl Copies {
    fn new(key: (Code, usize, usize)) -> Copies {
        let (code, rows, columns) = key;
        let (codes, levels, shape) = weights(rows, columns);
        let blob = encode(&codes, &levels, shape, code, &pool()).unwrap();
        let count = COLD.div_ceil(blob.len());
        let mut bytes = vec![0u8; count * blob.len() + 64];
        let first = bytes.as_ptr().align_offset(64);
        for copy in bytes[first..].chunks_exact_mut(blob.len()) {
            copy.copy_from_slice(&blob);
        }
        Copies {
            key,
            bytes,
            first,
            size: blob.len(),
        }
    }

    fn views(&self) -> Vec<TernaryView<'_>> {
        let copies = self.bytes[self.first..].chunks_exact(self.size);
        copies.map(|copy| TernaryView::parse(copy).unwrap()).collect()
    }
}

/// The copies of the previous case, which most cases share.
static COPIES: Mutex<Option<Copies>> = Mutex::new(None);

fn product(bencher: Bencher, case: &Case) {
    let (tokens, key) = (case.tokens, (case.code, case.rows, case.columns));
    let mut copies = COPIES.lock().unwrap();
    if copies.as_ref().is_none_or(|copies| copies.key != key) {
        *copies = None;
        *copies = Some(Copies::new(key));
    }
    let views = copies.as_ref().unwrap().views().into_iter();
    let weights: Vec<_> = views
        .map(|view| Ternary::with_kernel(case.kernel, view))
        .collect();
    let x: Vec<f32> = (0..tokens * case.columns)
        .map(|i| (i % 61) as f32 - 30.0)
        .collect();
    let (pool, next) = (pool(), AtomicUsize::new(0));
    let mut y = vec![0.0; tokens * case.rows];
    bencher
        .counter(ItemsCount::new(case.rows * case.columns))
        .bench_local(|| {
            let weights = &weights[next.fetch_add(1, Relaxed) % weights.len()];
            matmul(weights, 0, black_box(&x[..]), tokens, &mut y, &pool).unwrap();
        });
}

#[divan::bench(args = cases(Code::Fsv8, &[1, 4, 16, 64, 256]), max_time = 0.3, sample_size = 1)]
fn fsv8(bencher: Bencher, case: &Case) {
    product(bencher, case);
}

#[divan::bench(args = cases(Code::Dict16, &[1, 16]), max_time = 0.3, sample_size = 1)]
fn dict16(bencher: Bencher, case: &Case) {
    product(bencher, case);
}

#[divan::bench(args = Code::ALL.map(Code::name), max_time = 1)]
fn encoding(bencher: Bencher, code: &str) {
    let (codes, levels, shape) = weights(6144, 2080);
    let (code, pool) = (Code::from_name(code).unwrap(), pool());
    bencher
        .counter(ItemsCount::new(codes.len()))
        .bench_local(|| encode(black_box(&codes), &levels, shape, code, &pool).unwrap());
}

#[divan::bench(args = Code::ALL.map(Code::name), max_time = 1)]
fn decoding(bencher: Bencher, code: &str) {
    let (codes, levels, shape) = weights(6144, 2080);
    let (code, pool) = (Code::from_name(code).unwrap(), pool());
    let blob = encode(&codes, &levels, shape, code, &pool).unwrap();
    let view = TernaryView::parse(&blob).unwrap();
    let mut out = vec![0; codes.len()];
    bencher
        .counter(ItemsCount::new(codes.len()))
        .bench_local(|| decode_codes(black_box(&view), &mut out, &pool).unwrap());
}
