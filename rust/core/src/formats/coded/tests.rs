use proptest::prelude::*;

use super::*;
use crate::pool;
use crate::simd::{Isa, Kind};
use crate::types::Shape;

/// Plain symbols with any number of low bits.
const DENSE: Symbols = Symbols::Plain {
    low_bits: MAX_LOW_BITS,
};

/// Bytes from a linear congruential generator, which makes all of these tests repeatable.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    /// Approximately Gaussian, with the given deviation.
    pub fn normal(&mut self, deviation: f32) -> f32 {
        let sum: f32 = (0..12).map(|_| self.next() as f32 / (1u64 << 31) as f32).sum();
        (sum - 6.0) * deviation
    }
}

pub(crate) fn matrix(rows: usize, columns: usize) -> Shape {
    Shape {
        experts: 1,
        rows,
        columns,
        ndim: 2,
    }
}

/// Codes whose deviation grows from row to row, up to `deviation`.
pub(crate) fn gaussian(shape: Shape, deviation: f32, seed: u64) -> Vec<i32> {
    let mut random = Random(seed);
    let rows = shape.experts * shape.rows;
    let share = |row: usize| (0.3 + 0.7 * row as f32 / rows as f32) * deviation;
    let codes = (0..rows * shape.columns).map(|i| random.normal(share(i / shape.columns)).round() as i32);
    codes.collect()
}

/// Encodes with scale 0.5.
fn encoded_as(symbols: Symbols, codes: &[i32], shape: Shape, stream_rows: Option<usize>) -> Vec<u8> {
    let pool = pool::current().unwrap();
    encode(codes, &[0.5], shape, stream_rows, symbols, &pool).unwrap()
}

pub(crate) fn encoded(codes: &[i32], shape: Shape, stream_rows: Option<usize>) -> Vec<u8> {
    encoded_as(Symbols::PLAIN, codes, shape, stream_rows)
}

/// Encodes with the number of low bits that gives the smallest size.
pub(crate) fn encoded_with_low_bits(codes: &[i32], shape: Shape, stream_rows: Option<usize>) -> Vec<u8> {
    encoded_as(DENSE, codes, shape, stream_rows)
}

/// Encodes with column scales: shared by all experts for 16 rows, otherwise per expert.
fn encoded_with_columns(codes: &[i32], shape: Shape, stream_rows: Option<usize>) -> Vec<u8> {
    let rows = if stream_rows == Some(16) { 1 } else { shape.experts };
    let columns: Vec<f32> = (0..rows * shape.columns).map(|i| 0.1 * i as f32).collect();
    let scales = Scales {
        rows: &[0.5],
        columns: Some(&columns),
    };
    let pool = pool::current().unwrap();
    encode(codes, scales, shape, stream_rows, Symbols::PLAIN, &pool).unwrap()
}

/// Dependent codes with given indices, clamped to 2^27.
pub(crate) fn dependent(indices: &[i32], columns: usize) -> Vec<i32> {
    let rows = indices.chunks(columns.max(1));
    let codes = rows.flat_map(|row| {
        let mut states = [0u8; QUAD];
        row.iter().enumerate().map(move |(column, index)| {
            let (index, state) = (index.clamp(&-(1 << 27), &(1 << 27)), &mut states[column % QUAD]);
            let sign = 1 - 2 * i32::from(*state % 2);
            *state = trellis::NEXT[usize::from(2 * *state) + (index & 1) as usize];
            sign * (4 * index + 1)
        })
    });
    codes.collect()
}

pub(crate) fn encoded_dependent(codes: &[i32], shape: Shape, stream_rows: Option<usize>) -> Vec<u8> {
    encoded_as(Symbols::Dependent, codes, shape, stream_rows)
}

fn isas() -> impl Iterator<Item = Isa> {
    [Kind::Scalar, Kind::Avx2, Kind::Avx512]
        .into_iter()
        .filter_map(Isa::new)
}

fn decoded(view: &CodedView, isa: Isa) -> Vec<i32> {
    let mut codes = vec![0; view.layout().shape().weights().unwrap()];
    let put = |_, row: &[i32], out: &mut [i32]| {
        out.copy_from_slice(row);
        Ok(())
    };
    let pool = pool::current().unwrap();
    view.decode_rows(isa, &mut codes, &pool, put).unwrap();
    codes
}

/// Encodes codes, also as indices, checks them and decodes them on every instruction set.
fn round_trip(codes: &[i32], shape: Shape, stream_rows: Option<usize>) -> Vec<u8> {
    let data = encoded_with_low_bits(codes, shape, stream_rows);
    let paths = dependent(codes, shape.columns);
    for (data, codes) in [
        (&encoded(codes, shape, stream_rows), codes),
        (&encoded_dependent(&paths, shape, stream_rows), &paths),
        (&data, codes),
    ] {
        let coded = Coded::parse(data).unwrap();
        let view = coded.view(data).unwrap();
        for isa in isas() {
            view.verify(isa, &pool::current().unwrap()).unwrap();
            assert!(decoded(&view, isa) == codes, "{shape:?} on {}", isa.name());
        }
    }
    data
}

#[test]
fn all_shapes_round_trip() {
    for (experts, rows, columns) in [
        (1, 1, 1),
        (1, 15, 3),
        (3, 16, 4),
        (2, 17, 130),
        (1, 64, 7),
        (2, 100, 65),
        (3, 79, 256),
    ] {
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: 3,
        };
        for (stream_rows, deviation) in [(None, 1.0), (Some(16), 3.0), (Some(64), 0.2)] {
            round_trip(&gaussian(shape, deviation, 1), shape, stream_rows);
        }
    }
}

#[test]
fn empty_tensors_round_trip() {
    for (experts, rows, columns) in [(0, 3, 4), (2, 0, 4), (2, 3, 0)] {
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: 3,
        };
        let data = encoded(&[], shape, None);
        assert_eq!(Coded::parse(&data).unwrap().layout().shape(), shape);
        round_trip(&[], shape, None);
    }
}

#[test]
fn any_spread_round_trips() {
    let shape = matrix(40, 300);
    for deviation in [0.0, 0.01, 0.1, 0.4, 1.0, 2.0, 4.0, 8.0, 20.0, 60.0, 3000.0, 1e8] {
        round_trip(&gaussian(shape, deviation, 7), shape, Some(16));
    }
    round_trip(&vec![17; 40 * 300], shape, None);
    round_trip(&vec![-1_000_000; 40 * 300], shape, None);
    let mut one = vec![0; 40 * 300];
    one[7777] = 1 << 30;
    round_trip(&one, shape, None);
    let shifted: Vec<i32> = gaussian(shape, 9.0, 3).iter().map(|code| code + 90).collect();
    round_trip(&shifted, shape, None);
}

#[test]
fn types_of_codes_give_the_same_bytes() {
    let (shape, pool) = (matrix(33, 70), pool::current().unwrap());
    let codes = gaussian(shape, 2.0, 5);
    let short: Vec<i16> = codes.iter().map(|&code| code as i16).collect();
    let byte: Vec<i8> = codes.iter().map(|&code| code as i8).collect();
    let data = encoded(&codes, shape, None);
    assert!(encode(&short, &[0.5], shape, None, Symbols::PLAIN, &pool).unwrap() == data);
    assert!(encode(&byte, &[0.5], shape, None, Symbols::PLAIN, &pool).unwrap() == data);
    let codes = dependent(&codes, shape.columns);
    let short: Vec<i16> = codes.iter().map(|&code| code as i16).collect();
    let data = encoded_dependent(&codes, shape, None);
    assert!(encode(&short, &[0.5], shape, None, Symbols::Dependent, &pool).unwrap() == data);
}

#[test]
fn scales_round_trip_in_the_narrowest_type() {
    let (shape, pool) = (
        Shape {
            experts: 2,
            rows: 5,
            columns: 8,
            ndim: 3,
        },
        pool::current().unwrap(),
    );
    let codes = gaussian(shape, 1.0, 5);
    for (scales, name) in [(vec![0.5, -3.0], "bfloat16"), (vec![0.1, 7.0], "float32")] {
        let rows: Vec<f32> = scales.iter().cycle().take(10).copied().collect();
        for given in [&scales[..1], &rows] {
            let data = encode(&codes, given, shape, None, Symbols::PLAIN, &pool).unwrap();
            let coded = Coded::parse(&data).unwrap();
            let view = coded.view(&data).unwrap();
            let found: Vec<f32> = (0..10).map(|row| view.scale(row)).collect();
            let wanted: Vec<f32> = (0..10).map(|row| given[row % given.len()]).collect();
            assert_eq!((found, coded.layout().scale_type()), (wanted, name));
        }
    }
}

#[test]
fn arguments_out_of_range_are_refused() {
    let pool = pool::current().unwrap();
    let refused = |codes: &[i32], scales: &[f32], shape, rows| {
        let error = encode(codes, scales, shape, rows, Symbols::PLAIN, &pool).unwrap_err();
        assert!(matches!(error, crate::Error::InvalidArgument(_)), "{error}");
    };
    refused(&[1; 5], &[1.0], matrix(2, 3), None);
    refused(&[1; 6], &[1.0; 3], matrix(2, 3), None);
    refused(&[1; 6], &[f32::NAN], matrix(2, 3), None);
    refused(&[1; 6], &[1.0], matrix(2, 3), Some(32));
    refused(&[i32::MIN; 6], &[1.0], matrix(2, 3), None);
    refused(&[], &[1.0], matrix(0, MAX_COLUMNS + 1), None);
    let codes = [1, 1, 1, 3, 5, 1];
    let error = encode(&codes, &[1.0], matrix(1, 6), None, Symbols::Dependent, &pool).unwrap_err();
    assert!(error.to_string().contains("row 0"), "{error}");
    let many = Symbols::Plain {
        low_bits: MAX_LOW_BITS + 1,
    };
    assert!(encode(&[1], &[1.0], matrix(1, 1), None, many, &pool).is_err());
}

#[test]
fn sizes_are_near_the_entropy() {
    for (columns, deviation, most) in [
        (2048, 1.0, 1.016),
        (256, 1.0, 1.04),
        (4096, 2.0, 1.016),
        (4096, 4.0, 1.02),
    ] {
        let shape = matrix(1024, columns);
        let mut random = Random(3);
        let codes: Vec<i32> = (0..1024 * columns)
            .map(|_| random.normal(deviation).round() as i32)
            .collect();
        let bits = 8.0 * encoded(&codes, shape, None).len() as f64 / codes.len() as f64;
        let mut counts = std::collections::BTreeMap::<i32, f64>::new();
        codes
            .iter()
            .for_each(|&code| *counts.entry(code).or_default() += 1.0);
        let shares = counts.values().map(|count| count / codes.len() as f64);
        let entropy: f64 = shares.map(|share| -share * share.log2()).sum();
        assert!(
            bits < entropy * most,
            "{columns} columns: {bits:.4} bits, entropy {entropy:.4}"
        );
    }
}

#[test]
fn many_bits_are_near_the_entropy() {
    let shape = matrix(512, 1024);
    for (deviation, low_bits) in [(4.0f32, 0..=0), (25.0, 1..=3), (62.0, 2..=3)] {
        let mut random = Random(3);
        let codes: Vec<i32> = (0..512 * 1024)
            .map(|_| random.normal(deviation).round() as i32)
            .collect();
        let data = round_trip(&codes, shape, Some(64));
        let found = Layout::read(&data).unwrap().low_bits();
        assert!(low_bits.contains(&found), "{found} low bits");
        let bits = 8.0 * data.len() as f64 / codes.len() as f64;
        let entropy = f64::from(deviation).log2() + 2.047;
        assert!(
            bits < entropy * 1.02,
            "{deviation}: {bits:.4} bits, entropy {entropy:.4}"
        );
    }
}

#[test]
fn low_bits_in_padding_are_found() {
    let shape = matrix(17, 5);
    let data = encoded_with_low_bits(&gaussian(shape, 90.0, 2), shape, Some(64));
    let coded = Coded::parse(&data).unwrap();
    assert!(coded.layout().low_bits() > 0);
    let end = coded.layout().sections().unwrap().payload.end;
    let mut bad = data.clone();
    bad[end - 1] ^= 1 << 7; // the last lane of the second row block, which has one row
    let pool = pool::current().unwrap();
    let coded = Coded::parse(&bad).unwrap();
    assert!(coded.view(&bad).unwrap().verify(Isa::SCALAR, &pool).is_err());
}

#[test]
fn rows_of_different_spread_get_different_tables() {
    let shape = matrix(256, 1024);
    let data = encoded(&gaussian(shape, 3.0, 1), shape, Some(16));
    assert!(Coded::parse(&data).unwrap().layout().tables() > 1);
}

#[test]
fn looked_up_rows_match_the_whole_tensor() {
    let shape = Shape {
        experts: 2,
        rows: 100,
        columns: 67,
        ndim: 3,
    };
    let pool = pool::current().unwrap();
    let mut codes = gaussian(shape, 60.0, 4);
    codes[40 * 67 + 3] = 5000;
    let copy = |_, codes: &[i32], out: &mut [i32]| out.copy_from_slice(codes);
    let paths = dependent(&codes, 67);
    for (stream_rows, codes, data) in [16, 64].into_iter().flat_map(|stream_rows| {
        let plain = encoded_with_low_bits(&codes, shape, Some(stream_rows));
        let other = encoded_dependent(&paths, shape, Some(stream_rows));
        [(stream_rows, &codes, plain), (stream_rows, &paths, other)]
    }) {
        let coded = Coded::parse(&data).unwrap();
        let view = coded.view(&data).unwrap();
        for isa in isas() {
            for rows in [vec![], vec![40], vec![199, 0, 40, 40, 63, 64, 100, 0]] {
                let mut out = vec![0; rows.len() * 67];
                view.look_up(isa, &rows, &mut out, &pool, copy).unwrap();
                let wanted: Vec<i32> = rows
                    .iter()
                    .flat_map(|row| &codes[row * 67..][..67])
                    .copied()
                    .collect();
                assert!(out == wanted, "{rows:?} of {stream_rows} on {}", isa.name());
            }
        }
        assert!(
            view.look_up(Isa::SCALAR, &[200], &mut [0; 67], &pool, copy)
                .is_err()
        );
        assert!(
            view.look_up(Isa::SCALAR, &[3], &mut [0; 66], &pool, copy)
                .is_err()
        );
    }
}

/// Asserts that damaged bytes that parse decode to the same symbols on all instruction sets.
fn read_damaged(data: &[u8]) -> bool {
    let Ok(coded) = Coded::parse(data) else {
        return false;
    };
    let view = coded.view(data).unwrap();
    let wanted = decoded(&view, Isa::SCALAR);
    let pool = pool::current().unwrap();
    let verified = view.verify(Isa::SCALAR, &pool).is_ok();
    for isa in isas() {
        assert!(decoded(&view, isa) == wanted && view.verify(isa, &pool).is_ok() == verified);
    }
    verified
}

#[test]
fn damaged_bytes_are_found_or_harmless() {
    let shape = Shape {
        experts: 2,
        rows: 37,
        columns: 90,
        ndim: 3,
    };
    let mut random = Random(1);
    type Encode = fn(&[i32], Shape, Option<usize>) -> Vec<u8>;
    let of_paths: Encode =
        |indices, shape, rows| encoded_dependent(&dependent(indices, shape.columns), shape, rows);
    for (stream_rows, deviation, encode) in [
        (16, 2.0, encoded_with_low_bits as Encode),
        (64, 2.0, encoded_with_low_bits),
        (16, 80.0, encoded_with_low_bits),
        (64, 80.0, encoded_with_low_bits),
        (16, 2.0, of_paths),
        (64, 2.0, of_paths),
        (16, 2.0, encoded_with_columns),
        (64, 2.0, encoded_with_columns),
    ] {
        let mut codes = gaussian(shape, deviation, 9);
        codes[100] = 9999;
        let data = encode(&codes, shape, Some(stream_rows));
        let payload = Layout::read(&data).unwrap().sections().unwrap().payload.clone();
        let (mut flips, mut found) = (0, 0);
        for _ in 0..600 {
            let mut bad = data.clone();
            let place = random.next() as usize % bad.len();
            bad[place] ^= 1 << (random.next() % 8);
            let whole = read_damaged(&bad);
            if payload.contains(&place) {
                (flips, found) = (flips + 1, found + usize::from(!whole));
            }
        }
        // Any low bits are valid codes; only the manifest's checksums find damage there.
        assert!(deviation > 2.0 || found * 100 >= flips * 95, "{found} of {flips}");
        for end in 0..data.len() {
            assert!(Coded::parse(&data[..end]).is_err());
        }
        let mut longer = data.clone();
        longer.extend([0; 64]);
        assert!(Coded::parse(&longer).is_err());
    }
}

#[test]
fn hostile_headers_are_refused() {
    let shape = matrix(20, 40);
    let data = encoded(&gaussian(shape, 1.0, 9), shape, None);
    for (at, value) in [
        (8, 0u64),
        (8, 2),
        (9, 1),
        (10, 4),
        (11, 2),
        (12, 2),
        (13, 2),
        (14, 0),
        (14, 65),
        (15, 1),
        (15, 65),
        (16, u64::MAX),
        (24, u64::MAX),
        (24, 1 << 40),
        (32, 1 << 18),
        (32, u64::MAX),
        (40, 0),
        (40, u64::MAX - 4),
        (48, 1),
        (48, u64::MAX),
        (56, 3),
        (57, 16),
        (58, 4),
        (59, 2),
        (60, 1),
        (60, 3),
        (61, 1),
    ] {
        let mut bad = data.clone();
        let width = if (16..56).contains(&at) { 8 } else { 1 };
        bad[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        assert!(Coded::parse(&bad).is_err(), "{value} at {at}");
    }
}

#[test]
fn symbols_have_one_meaning() {
    let shape = matrix(20, 40);
    let data = encoded_dependent(&dependent(&gaussian(shape, 1.0, 9), 40), shape, None);
    let read = |low_bits, kind| {
        let mut data = data.clone();
        (data[58], data[59]) = (low_bits, kind);
        Layout::read(&data).map(|layout| layout.symbols())
    };
    for low_bits in 0..=3 {
        assert_eq!(
            read(low_bits, 0),
            Ok(Symbols::Plain {
                low_bits: low_bits.into()
            })
        );
    }
    assert_eq!(read(0, 1), Ok(Symbols::Dependent));
    for (low_bits, kind) in [(4, 0), (1, 1), (3, 1), (0, 2), (0, 255)] {
        assert!(matches!(read(low_bits, kind), Err(crate::Error::Corruption(_))));
    }
}

#[test]
fn other_versions_are_refused_by_number() {
    let shape = matrix(20, 40);
    for version in [0u8, 2, 3, 4, 255] {
        let mut data = encoded(&gaussian(shape, 1.0, 9), shape, None);
        data[8] = version;
        let error = Coded::parse(&data).unwrap_err();
        assert!(matches!(error, crate::Error::Corruption(_)));
        let message = format!("version {version}; this library reads 1");
        assert!(error.to_string().contains(&message), "{error}");
    }
}

#[test]
fn tables_of_dependent_codes_start_at_even_indices_within_reach() {
    let shape = matrix(16, 64);
    let data = encoded_dependent(&dependent(&gaussian(shape, 1.0, 9), 64), shape, None);
    let table = Layout::read(&data).unwrap().sections().unwrap().tables.start;
    assert_eq!(data[table] % 2, 0);
    for lowest in [data[table].wrapping_add(1), (-34i8) as u8, 30] {
        let mut bad = data.clone();
        bad[table] = lowest;
        assert!(Coded::parse(&bad).is_err());
    }
}

#[test]
fn golden_files_with_scales_of_columns_are_read() {
    let pool = pool::current().unwrap();
    for (data, kind, rows) in [
        (
            &include_bytes!("../../../../../tests/golden/coded/columns.bin")[..],
            ColumnScales::Shared,
            1,
        ),
        (
            include_bytes!("../../../../../tests/golden/coded/columns-of-experts.bin"),
            ColumnScales::OfExpert,
            2,
        ),
    ] {
        let coded = Coded::parse(data).unwrap();
        let (view, layout) = (coded.view(data).unwrap(), coded.layout());
        view.verify(Isa::SCALAR, &pool).unwrap();
        assert_eq!(layout.column_scales(), kind);
        let (codes, columns) = (decoded(&view, Isa::SCALAR), view.column_scales());
        assert_eq!(columns.len(), rows * layout.shape().columns);
        let scales = Scales {
            rows: &view.row_scales(),
            columns: Some(&columns),
        };
        let rows = Some(layout.stream_rows());
        let again = encode(&codes, scales, layout.shape(), rows, layout.symbols(), &pool);
        assert!(again.unwrap() == data);
    }
}

proptest! {
    #[test]
    fn any_codes_round_trip(
        rows in 1usize..70,
        columns in 1usize..40,
        stream_rows in prop_oneof![Just(16usize), Just(64)],
        spread in 1i32..2000,
        seed: u64,
    ) {
        let shape = matrix(rows, columns);
        let mut random = Random(seed);
        let code = |random: &mut Random| (random.next() as i32 % spread) * i32::from(random.next() > u32::MAX / 6);
        let codes: Vec<i32> = (0..rows * columns).map(|_| code(&mut random)).collect();
        round_trip(&codes, shape, Some(stream_rows));
    }

    #[test]
    fn random_payloads_decode_the_same_on_all_sets(seed: u64, rows in 1usize..70, columns in 1usize..70) {
        let shape = matrix(rows, columns);
        let codes = gaussian(shape, 1.5, seed);
        let mut data = encoded(&codes, shape, None);
        let payload = Layout::read(&data).unwrap().sections().unwrap().payload.clone();
        let mut random = Random(seed);
        data[payload].fill_with(|| random.next() as u8);
        read_damaged(&data);
    }
}
