use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::pool;
use crate::types::Shape;

/// A tensor and its source values as f32, E x I x 2 H.
pub(crate) struct Case {
    pub values: Vec<f32>,
    pub thresholds: Vec<f32>,
    pub blob: Vec<u8>,
}

pub(crate) fn shape(experts: usize, rows: usize, half: usize) -> Shape {
    Shape {
        experts,
        rows,
        columns: 2 * half,
        ndim: 3,
    }
}

/// A tensor of pseudo-random values; thresholds ascend from 0.
pub(crate) fn case(shape: Shape, width: Width, step: f32) -> Case {
    let mut state = (shape.experts * 31 + shape.rows * 7 + shape.columns) as u32 + 1;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize
    };
    let (pool, layout) = (pool::current().unwrap(), Layout::new(shape, width).unwrap());
    let thresholds: Vec<f32> = (0..shape.experts).map(|expert| expert as f32 * step).collect();
    let count = shape.weights().unwrap();
    let mut number = |levels: usize| (next() % levels) as f32 / levels as f32 - 0.5;
    if width == Width::Bf16 {
        let bits: Vec<u16> = (0..count)
            .map(|_| bf16::from_f32(number(4096)).to_bits())
            .collect();
        let values = bits.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
        let blob = encode(Content::Bf16(&bits), &thresholds, shape, &pool).unwrap();
        return Case {
            values,
            thresholds,
            blob,
        };
    }
    let (bits, groups) = (width.bits() as u8, layout.groups());
    let scales: Vec<f32> = (0..2 * groups * shape.experts * shape.rows)
        .map(|_| bf16::from_f32(number(256) / 64.0).to_f32())
        .collect();
    let levels = 1 << bits;
    let codes: Vec<u8> = (0..count)
        .map(|_| ((number(levels) + 0.5) * levels as f32) as u8)
        .collect();
    let half = layout.half();
    let value = |(at, &code): (usize, &u8)| {
        let (number, column) = (at / half, at % half);
        scales[number * groups + column / GROUP] * (f32::from(code) - levels as f32 / 2.0)
    };
    let values = codes.iter().enumerate().map(value).collect();
    let content = Content::Integers {
        bits,
        codes: &codes,
        scales: &scales,
    };
    let blob = encode(content, &thresholds, shape, &pool).unwrap();
    Case {
        values,
        thresholds,
        blob,
    }
}

fn values(view: &View) -> Vec<f32> {
    let shape = view.layout().shape();
    let mut values = vec![f32::NAN; shape.weights().unwrap()];
    let rows = values.chunks_exact_mut(shape.columns.max(1)).enumerate();
    rows.for_each(|(record, values)| view.decode_values(record, values));
    values
}

proptest! {
    #[test]
    fn every_width_survives_a_round_trip(experts in 1..3usize, rows in 0..5usize, half in 0..200usize) {
        for width in Width::ALL {
            let case = case(shape(experts, rows, half), width, 0.25);
            let view = View::parse(&case.blob).unwrap();
            view.verify(&pool::current().unwrap()).unwrap();
            prop_assert_eq!(values(&view), &case.values[..]);
            let thresholds: Vec<f32> = (0..experts).map(|expert| view.threshold(expert)).collect();
            prop_assert_eq!(thresholds, case.thresholds);
            prop_assert_eq!(view.layout().record_bytes() % ALIGNMENT, 0);
        }
    }
}

#[test]
fn every_truncation_and_every_header_byte_is_noticed() {
    let case = case(shape(2, 3, 70), Width::Int4, 0.5);
    for length in 0..case.blob.len() {
        assert!(View::parse(&case.blob[..length]).is_err());
    }
    // The number of columns may change within the last group: nothing else depends on it.
    for byte in (0..HEADER_BYTES).filter(|&byte| byte != 32) {
        let mut blob = case.blob.clone();
        blob[byte] ^= 0x10;
        assert!(View::parse(&blob).is_err(), "byte {byte}");
    }
}

#[test]
fn verify_finds_invalid_numbers_and_padding() {
    let pool = pool::current().unwrap();
    for width in Width::ALL {
        let case = case(shape(2, 3, 70), width, 0.5);
        let layout = View::parse(&case.blob).unwrap().layout();
        let record = layout.record_at(4);
        let last = record + layout.record_bytes() - 1;
        let mut places = vec![
            (HEADER_BYTES + 3, 0xff, "expert 0"),
            (HEADER_BYTES + 2 * 4, 1, "thresholds"),
            (record + layout.half_bytes() - 1, 0x70, "expert 1 channel 1"),
        ];
        match width {
            Width::Bf16 => places.push((record + 1, 0x7f, "expert 1 channel 1")),
            _ => places.push((record + 2 * layout.half_bytes() + 1, 0x7f, "expert 1 channel 1")),
        }
        if last >= record + 2 * layout.half_bytes() + 4 * layout.groups() {
            places.push((last, 1, "expert 1 channel 1"));
        }
        for (place, bits, names) in places {
            let mut blob = case.blob.clone();
            blob[place] |= bits;
            if blob[place] & 0x7f == 0x7f {
                blob[place - 1] = 0xff;
            }
            let error = View::parse(&blob).unwrap().verify(&pool).unwrap_err();
            assert!(error.to_string().contains(names), "{width:?} {place}: {error}");
        }
    }
}

#[test]
fn invalid_content_is_refused() {
    let pool = pool::current().unwrap();
    let stack = shape(1, 1, 2);
    let integers = |bits, codes, scales| {
        let content = Content::Integers { bits, codes, scales };
        encode(content, &[0.0], stack, &pool)
    };
    assert!(integers(4, &[15; 4], &[0.5, 0.25]).is_ok());
    assert!(integers(4, &[16; 4], &[0.5, 0.25]).is_err());
    assert!(integers(5, &[0; 4], &[0.5, 0.25]).is_err());
    assert!(integers(16, &[0; 4], &[0.5, 0.25]).is_err());
    assert!(integers(4, &[0; 4], &[0.5, 0.1]).is_err());
    assert!(integers(4, &[0; 4], &[0.5]).is_err());
    let plain = |values: &[u16], thresholds: &[f32]| encode(Content::Bf16(values), thresholds, stack, &pool);
    assert!(plain(&[0; 4], &[f32::INFINITY]).is_ok());
    assert!(plain(&[0x7f80; 4], &[0.0]).is_err());
    assert!(plain(&[0; 4], &[f32::NAN]).is_err() && plain(&[0; 4], &[-1.0]).is_err());
    assert!(plain(&[0; 4], &[]).is_err() && plain(&[0; 3], &[0.0]).is_err());
    let odd = Shape { columns: 3, ..stack };
    assert!(encode(Content::Bf16(&[0; 3]), &[0.0], odd, &pool).is_err());
}
