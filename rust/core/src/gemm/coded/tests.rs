use super::prepared::Bytes;
use super::*;
use crate::formats::coded::tests::{Random, dependent, gaussian};
use crate::formats::coded::{
    self as format, Affine, BLOCK_ROWS, LANES, MAX_LOW_BITS, QUAD, Register, Scales, Symbols, encode,
};
use crate::gemm::groupwise::Precision;
use crate::gemm::{matmul, matmul_grouped};
use crate::pool;
use crate::simd::Isa;
use crate::types::Shape;

/// A tensor, its codes, and its scales.
struct Case {
    shape: Shape,
    symbols: Symbols,
    stream_rows: Option<usize>,
    data: Vec<u8>,
    codes: Vec<i32>,
    scales: Vec<f32>,
    /// Column scales: none, C, or E x C.
    columns: Vec<f32>,
}

impl Case {
    fn new(shape: Shape, stream_rows: usize, deviation: f32) -> Case {
        let mut codes = gaussian(shape, deviation, 11);
        if let Some(code) = codes.get_mut(shape.columns + 1) {
            *code = -1234;
        }
        let scales: Vec<f32> = (0..shape.experts * shape.rows)
            .map(|row| 0.1 + row as f32 / 7.0)
            .collect();
        let case = Case {
            shape,
            symbols: Symbols::Plain {
                low_bits: MAX_LOW_BITS,
            },
            stream_rows: Some(stream_rows),
            data: Vec::new(),
            codes,
            scales,
            columns: Vec::new(),
        };
        case.encoded()
    }

    fn encoded(mut self) -> Case {
        let (codes, shape, rows) = (&self.codes, self.shape, self.stream_rows);
        let scales = Scales {
            rows: &self.scales,
            columns: Some(&self.columns[..]).filter(|columns| !columns.is_empty()),
        };
        let pool = pool::current().unwrap();
        self.data = encode(codes, scales, shape, rows, self.symbols, &pool).unwrap();
        self
    }

    /// The same tensor with `rows` rows of column scales that differ by orders of magnitude.
    fn with_columns(&self, rows: usize) -> Case {
        let mut random = Random(rows as u64);
        let count = rows * self.shape.columns;
        let columns = (0..count).map(|_| {
            random.normal(2.0).exp2()
                * if random.next().is_multiple_of(2) {
                    1.0
                } else {
                    -1.0
                }
        });
        Case {
            columns: columns.collect(),
            ..self.copy()
        }
        .encoded()
    }

    fn copy(&self) -> Case {
        Case {
            data: Vec::new(),
            codes: self.codes.clone(),
            scales: self.scales.clone(),
            columns: self.columns.clone(),
            ..*self
        }
    }

    /// The scale of a column of an expert.
    fn column(&self, expert: usize, column: usize) -> f32 {
        match self.columns.len() {
            0 => 1.0,
            all => self.columns[(expert * self.shape.columns + column) % all],
        }
    }

    /// Dependent codes with these codes as indices.
    fn dependent(&self) -> Case {
        Case {
            symbols: Symbols::Dependent,
            stream_rows: None,
            codes: dependent(&self.codes, self.shape.columns),
            ..self.copy()
        }
        .encoded()
    }

    /// The quantized activations of an expert's token, times the column scales. They are checked to be within 1/254 or
    /// 2^-23 of the largest of their piece, up to rounding.
    fn seen(&self, precision: Precision, isa: Isa, x: &[f32], (expert, token): (usize, usize)) -> Vec<f64> {
        let columns = self.shape.columns;
        let exact: Vec<f64> = x[token * columns..][..columns]
            .iter()
            .enumerate()
            .map(|(column, &x)| f64::from(x) * f64::from(self.column(expert, column)))
            .collect();
        let parsed = format::Coded::parse(&self.data).unwrap();
        let scales = parsed.view(&self.data).unwrap().columns(expert);
        let token = prepared::Token::new(isa, precision, &x.into(), token, columns, scales);
        let rounded: Vec<f32> = (0..columns).map(|column| token.value(column)).collect();
        for (exact, rounded) in exact.chunks(PIECE * QUAD).zip(rounded.chunks(PIECE * QUAD)) {
            let largest = exact.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
            let most = match precision {
                Precision::Int8 => largest / 253.9,
                Precision::Exact => largest * 0.5f64.powi(23),
            };
            for (x, y) in exact.iter().zip(rounded) {
                assert!((x - f64::from(*y)).abs() <= most + 4.0 * 0.5f64.powi(24) * x.abs());
            }
        }
        rounded.into_iter().map(f64::from).collect()
    }

    /// The product of a row with a token, and the magnitude that scales its error bound.
    fn product(&self, row: usize, x: &[f64]) -> [f64; 2] {
        let codes = &self.codes[row * self.shape.columns..][..self.shape.columns];
        let terms = codes.iter().zip(x).map(|(&code, &x)| f64::from(code) * x);
        let sums = terms.fold([0.0, 0.0], |[sum, size], term| [sum + term, size + term.abs()]);
        sums.map(|sum| sum * f64::from(self.scales[row]))
    }

    /// Computes products, checks them against the error bound and returns their bits.
    fn check(&self, mode: Mode, isa: Isa, x: &[f32], offsets: &[usize]) -> Vec<u32> {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.shape;
        let parsed = format::Coded::parse(&self.data).unwrap();
        let weights = Coded::new(parsed.view(&self.data).unwrap(), mode, isa).unwrap();
        let mut y = vec![f32::NAN; offsets[experts] * rows];
        matmul_grouped(&weights, x, offsets, &mut y, &pool::current().unwrap()).unwrap();
        let precision = if mode == Mode::Int8 {
            Precision::Int8
        } else {
            Precision::Exact
        };
        for (expert, token) in (0..experts).flat_map(|e| (offsets[e]..offsets[e + 1]).map(move |t| (e, t))) {
            let seen = self.seen(precision, isa, x, (expert, token));
            for row in 0..rows {
                let [wanted, size] = self.product(expert * rows + row, &seen);
                let panels = matches!(mode, Mode::Auto | Mode::Bf16);
                let steps = match panels {
                    true => (columns as f64 / 4.0 + 10.0) * 0.5f64.powi(24) + 0.5f64.powi(7),
                    false => (columns as f64 / 128.0 + 10.0) * 0.5f64.powi(24),
                };
                let found = f64::from(y[token * rows + row]);
                assert!(
                    (found - wanted).abs() <= steps * size,
                    "{mode:?} on {}, {:?}: row {row} of token {token} is {found} instead of {wanted}",
                    isa.name(),
                    self.shape
                );
            }
        }
        y.into_iter().map(f32::to_bits).collect()
    }
}

fn tokens(count: usize, columns: usize) -> Vec<f32> {
    let mut random = Random(5);
    (0..count * columns).map(|_| random.normal(1.0)).collect()
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

#[test]
fn products_match_the_codes() {
    let shapes = [(1, 1, 1), (1, 16, 128), (2, 100, 130), (3, 33, 259), (1, 70, 515)];
    for (experts, rows, columns) in shapes {
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: 3,
        };
        for (stream_rows, deviation) in [(16, 0.3), (64, 1.5), (16, 12.0), (64, 30.0), (16, 90.0)] {
            let plain = Case::new(shape, stream_rows, deviation);
            let mut cases = vec![plain.dependent(), plain];
            for number in 0..cases.len() {
                cases.push(cases[number].with_columns(1));
                if experts > 1 {
                    cases.push(cases[number].with_columns(experts));
                }
            }
            for (case, count) in cases
                .iter()
                .flat_map(|case| [1, 3, 19].map(|count| (case, count)))
            {
                let mut offsets = vec![0, count];
                offsets.resize(experts + 1, count + 2);
                let x = tokens(offsets[experts], columns);
                for (mode, isa) in MODES
                    .into_iter()
                    .flat_map(|mode| isas().map(move |isa| (mode, isa)))
                {
                    let found = case.check(mode, isa, &x, &offsets);
                    if matches!(mode, Mode::Int8 | Mode::Exact) {
                        assert!(found == case.check(mode, Isa::SCALAR, &x, &offsets));
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_the_largest_bytes_do_not_overflow() {
    for most in [2, 16, 17, 32, 33, 64, 65, 128] {
        let symbols = [Register([most as u8 - 1; LANES]); 7];
        for byte in [-128, 127] {
            let (bytes, wanted) = ([byte; 7 * QUAD], 28 * (most as i32 - 1) * i32::from(byte));
            let affine = Affine {
                factor: 1,
                offset: 0,
                most,
            };
            let x = Bytes {
                planes: [&bytes[..]],
                scale: 1.0,
                sums: [0],
            };
            for isa in isas() {
                let mut found = [[0.0; BLOCK_ROWS]; 3];
                products::add(isa, &symbols, affine, [x; 3], &mut found);
                assert_eq!(
                    found,
                    [[wanted as f32; BLOCK_ROWS]; 3],
                    "below {most} on {}",
                    isa.name()
                );
                let mut found = [[0.0; BLOCK_ROWS]];
                let x = Bytes {
                    planes: [&bytes[..]; 3],
                    scale: 1.0,
                    sums: [0; 3],
                };
                products::add(isa, &symbols, affine, [x], &mut found);
                let wanted = (257 * wanted) as f32 * 256.0 + wanted as f32;
                assert_eq!(found, [[wanted; BLOCK_ROWS]], "below {most} on {}", isa.name());
            }
        }
    }
}

#[test]
fn a_token_gives_the_same_alone_and_with_others() {
    let shape = Shape {
        experts: 1,
        rows: 150,
        columns: 300,
        ndim: 2,
    };
    let plain = Case::new(shape, 16, 2.0);
    let x = tokens(140, 300);
    let cases = [plain.dependent(), plain.with_columns(1), plain];
    for (case, mode, isa) in cases.iter().flat_map(|case| {
        let modes = [Mode::Exact, Mode::Int8].into_iter();
        modes.flat_map(move |mode| isas().map(move |isa| (case, mode, isa)))
    }) {
        let all = case.check(mode, isa, &x, &[0, 140]);
        for token in [0, 17, 127, 128, 139] {
            let alone = case.check(mode, isa, &x[token * 300..][..300], &[0, 1]);
            assert!(alone == all[token * 150..][..150]);
        }
    }
}

#[test]
fn nan_and_infinity_affect_only_their_token() {
    let shape = Shape {
        experts: 1,
        rows: 40,
        columns: 200,
        ndim: 2,
    };
    let plain = Case::new(shape, 64, 2.0);
    let cases = [plain.with_columns(1), plain];
    for ((mode, isa), case) in MODES
        .into_iter()
        .flat_map(|mode| isas().map(move |isa| (mode, isa)))
        .flat_map(|of| cases.iter().map(move |case| (of, case)))
    {
        let parsed = format::Coded::parse(&case.data).unwrap();
        let weights = Coded::new(parsed.view(&case.data).unwrap(), mode, isa).unwrap();
        for count in [2, 20] {
            let mut x = tokens(count, 200);
            x[3] = f32::NAN;
            let mut y = vec![0.0; count * 40];
            matmul(&weights, 0, &x[..], count, &mut y, &pool::current().unwrap()).unwrap();
            assert!(y[..40].iter().all(|y| y.is_nan()) && y[40..].iter().all(|y| y.is_finite()));
        }
    }
}

#[test]
fn empty_tensors_give_zeros() {
    for (experts, rows, columns) in [(1, 5, 0), (1, 0, 5)] {
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: 3,
        };
        let case = Case::new(shape, 16, 1.0);
        for mode in MODES {
            let parsed = format::Coded::parse(&case.data).unwrap();
            let weights = Coded::new(parsed.view(&case.data).unwrap(), mode, Isa::SCALAR).unwrap();
            let mut y = vec![1.0; 9 * rows];
            matmul(
                &weights,
                0,
                &vec![1.0; 9 * columns][..],
                9,
                &mut y,
                &pool::current().unwrap(),
            )
            .unwrap();
            assert!(y.iter().all(|&y| y == 0.0));
        }
    }
}

#[test]
fn other_modes_are_refused() {
    let case = Case::new(
        Shape {
            experts: 1,
            rows: 5,
            columns: 5,
            ndim: 2,
        },
        16,
        1.0,
    );
    let parsed = format::Coded::parse(&case.data).unwrap();
    assert!(Coded::new(parsed.view(&case.data).unwrap(), Mode::Int16, Isa::SCALAR).is_err());
}
