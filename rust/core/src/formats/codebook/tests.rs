use proptest::prelude::*;

use super::*;
use crate::pool;
use crate::types::Shape;

pub(crate) struct Case {
    pub shape: Shape,
    pub bits: u8,
    pub activation_bits: u8,
    pub block: usize,
    pub hadamard: usize,
    pub codes: Vec<u8>,
    pub centroids: Vec<i16>,
    pub scales: Vec<f32>,
}

impl Case {
    /// A tensor of pseudo-random codes, centroids and scales.
    pub fn new(bits: u8, [experts, rows, columns]: [usize; 3], block: usize) -> Case {
        let mut state = (experts * 31 + rows * 7 + columns + usize::from(bits)) as u32 + 1;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let books = experts * rows * columns.div_ceil(block);
        let clusters = 1 << bits;
        Case {
            shape: Shape {
                experts,
                rows,
                columns,
                ndim: 3,
            },
            bits,
            activation_bits: 0,
            block,
            hadamard: 1,
            codes: (0..experts * rows * columns)
                .map(|_| (next() % clusters) as u8)
                .collect(),
            centroids: (0..books * clusters as usize)
                .map(|_| (next() % 65_279) as i16 ^ i16::MIN)
                .map(|c| c.clamp(-MAX_CENTROID, MAX_CENTROID))
                .collect(),
            scales: (0..books).map(|_| (next() % 1000) as f32 / 1e6).collect(),
        }
    }

    /// The same tensor with activations rounded to 8 bits: centroids are rounded to one byte.
    pub fn of_one_byte(mut self) -> Case {
        self.activation_bits = 8;
        let round = |centroid: &mut i16| *centroid = 256 * i16::from(split(*centroid).0);
        self.centroids.iter_mut().for_each(round);
        self
    }

    /// Both variants of a tensor: two-byte and one-byte centroids.
    pub fn both(bits: u8, shape: [usize; 3], block: usize) -> [Case; 2] {
        let new = || Case::new(bits, shape, block);
        [new(), new().of_one_byte()]
    }

    pub fn content(&self) -> Content<'_> {
        Content {
            shape: self.shape,
            bits: self.bits,
            activation_bits: self.activation_bits,
            block: self.block,
            hadamard: self.hadamard,
            codes: &self.codes,
            centroids: &self.centroids,
            scales: &self.scales,
        }
    }

    pub fn blob(&self) -> Vec<u8> {
        encode(self.content(), &pool::current().unwrap()).unwrap()
    }
}

#[test]
fn centroids_round_trip_through_their_bytes() {
    for centroid in -MAX_CENTROID..=MAX_CENTROID {
        let (high, low) = split(centroid);
        assert_eq!(join(high, low), i32::from(centroid));
        assert_eq!(
            i32::from(high),
            ((f64::from(centroid) + 0.5) / 256.0).round() as i32,
            "{centroid}"
        );
    }
}

proptest! {
    #[test]
    fn codes_round_trip(
        bits in 2u8..5, experts in 0usize..3, rows in 0usize..35, columns in 0usize..300, units in 1usize..4,
        centroid_bytes in 1usize..3,
    ) {
        let [two, one] = Case::both(bits, [experts, rows, columns], 128 * units);
        let case = if centroid_bytes == 1 { one } else { two };
        let blob = case.blob();
        let view = View::parse(&blob).unwrap();
        view.verify().unwrap();
        prop_assert_eq!(view.layout().planes(), centroid_bytes);
        prop_assert_eq!(blob.len() % 64, 0);
        let (mut codes, mut values) = (vec![9; columns], vec![0.0; columns]);
        for row in 0..experts * rows {
            view.decode_row(row / rows, row % rows, &mut codes);
            prop_assert_eq!(&codes, &case.codes[row * columns..][..columns]);
            view.decode_values(row / rows, row % rows, &mut values);
            for (column, value) in values.iter().enumerate() {
                let book = row * columns.div_ceil(case.block) + column / case.block;
                let centroid = case.centroids[(book << bits) + usize::from(codes[column])];
                prop_assert_eq!(*value, case.scales[book] * f32::from(centroid));
            }
        }
    }

    #[test]
    fn any_bytes_are_read_safely(
        mut data in prop::collection::vec(any::<u8>(), 0..2000), bits in 2u8..5, activation_bits in 0u8..2,
    ) {
        let shape = Shape { experts: 1, rows: 3, columns: 40, ndim: 3 };
        let layout = Layout::new(shape, bits, 8 * activation_bits, 128, 1).unwrap();
        data.resize(layout.total_bytes(), 7);
        layout.write(&mut data);
        data[13] %= 4;
        let reserved = [14, 15].into_iter().chain(48..128);
        reserved.for_each(|at| data[at] = 0);
        let view = View::parse(&data).unwrap();
        let _ = view.verify();
        view.decode_values(0, 2, &mut [0.0; 40]);
    }
}

#[test]
fn every_truncation_and_extension_is_refused() {
    for case in Case::both(4, [2, 17, 130], 128) {
        let mut blob = case.blob();
        for length in 0..blob.len() {
            assert!(View::parse(&blob[..length]).is_err(), "{length}");
        }
        let longer = [&blob[..], &[0; 64]].concat();
        assert!(View::parse(&longer).is_err());
        // The bits of activations determine whether centroids have one byte or two.
        blob[11] ^= 8;
        assert!(View::parse(&blob).is_err());
    }
}

#[test]
fn tensors_of_older_versions_are_refused_as_such() {
    let refusal = |blob: &[u8]| View::parse(blob).unwrap_err().to_string();
    for bits in 2..=4 {
        let [mut old, new] = Case::both(bits, [2, 17, 130], 128).map(|case| case.blob());
        old[11] = 8;
        assert!(refusal(&old).contains("older version"));
        for other in [&old[1..], &[&old[..], &[0]].concat(), &new[1..]] {
            assert!(!refusal(other).contains("older version"));
        }
    }
}

#[test]
fn one_byte_centroids_save_16_clusters_and_a_sum_per_block() {
    for bits in 2..=4 {
        let [two, one] = Case::both(bits, [1, 16, 256], 128).map(|case| case.blob().len());
        assert_eq!(two - one, 2 * 16 * ((1 << bits) + 4));
    }
    // 16 rows of 256 columns at 4 bits, with 16 bytes of centroids, a scale and a sum each.
    let one = Case::new(4, [1, 16, 256], 256).of_one_byte().blob();
    assert_eq!(one.len(), HEADER_BYTES + 16 * (128 + 16 + 4 + 4));
}

#[test]
fn hostile_headers_are_refused_before_anything_is_computed() {
    let blob = Case::new(3, [1, 16, 128], 128).blob();
    for (at, value) in [
        (0, b'X'),
        (8, 2),
        (10, 1),
        (10, 5),
        (11, 5),
        (12, 1),
        (12, 4),
        (13, 8),
        (13, 64),
        (14, 1),
        (23, 0xff),
        (31, 0xff),
        (34, 2),
        (39, 0xff),
        (40, 1),
        (47, 0xff),
        (50, 1),
        (127, 1),
    ] {
        let mut bad = blob.clone();
        bad[at] = value;
        assert!(View::parse(&bad).is_err(), "byte {at} = {value}");
    }
    let mut zero_block = blob.clone();
    zero_block[40..48].fill(0);
    assert!(View::parse(&zero_block).is_err());
}

#[test]
fn verify_names_the_fault() {
    let case = Case::new(4, [1, 3, 40], 128);
    let blob = case.blob();
    let clusters = 16;
    let scales = HEADER_BYTES + 32 * clusters;
    let spoil = |at: usize, bytes: &[u8]| {
        let mut bad = blob.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        View::parse(&bad).unwrap().verify().unwrap_err().to_string()
    };
    assert!(spoil(scales, &f32::NAN.to_le_bytes()).contains("row 0 block 0: scale NaN"));
    assert!(spoil(scales + 4, &(-1f32).to_le_bytes()).contains("row 1 block 0: scale -1"));
    assert!(spoil(scales + 64, &[0xff, 0xff]).contains("sums"));
    assert!(spoil(scales + 12, &1f32.to_le_bytes()).contains("row 3 block 0: a padding row"));
    assert!(spoil(blob.len() - 256 + 8, &[0x10]).contains("after the last column"));
}

#[test]
fn verify_names_the_fault_with_one_byte_centroids() {
    let blob = Case::new(4, [1, 3, 40], 128).of_one_byte().blob();
    let scales = HEADER_BYTES + 16 * 16;
    let spoil = |at: usize, bytes: &[u8]| {
        let mut bad = blob.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        View::parse(&bad).unwrap().verify().unwrap_err().to_string()
    };
    assert!(spoil(scales + 8, &f32::NAN.to_le_bytes()).contains("row 2 block 0: scale NaN"));
    assert!(spoil(scales + 64, &[0xff, 0xff]).contains("row 0 block 0: wrong sums"));
    assert!(spoil(scales + 12, &1f32.to_le_bytes()).contains("row 3 block 0: a padding row"));
    assert!(spoil(HEADER_BYTES, &[!blob[HEADER_BYTES]]).contains("row 0 block 0: wrong sums"));
    assert!(spoil(HEADER_BYTES + 3 * 16 + 1, &[1]).contains("row 3 block 0: a padding row"));
}

#[test]
fn content_out_of_range_is_refused() {
    let case = Case::new(2, [1, 2, 130], 128);
    let shape = |ndim, columns| Shape {
        ndim,
        columns,
        ..case.shape
    };
    let (codes, scales) = (vec![4; case.codes.len()], vec![f32::INFINITY; case.scales.len()]);
    let centroids = vec![i16::MIN; case.centroids.len()];
    let large = vec![1e36; case.scales.len()]; // finite, but its products with centroids are not
    let valid = case.content();
    for content in [
        Content { bits: 5, ..valid },
        Content { block: 100, ..valid },
        Content { block: 0, ..valid },
        Content { hadamard: 0, ..valid },
        Content { hadamard: 3, ..valid },
        Content { hadamard: 4, ..valid },
        Content {
            activation_bits: 16,
            ..valid
        },
        // One-byte centroids would lose their low bytes.
        Content {
            activation_bits: 8,
            ..valid
        },
        Content {
            shape: shape(1, 130),
            ..valid
        },
        Content {
            shape: shape(3, 131),
            ..valid
        },
        Content {
            shape: shape(3, 1 << 20),
            ..valid
        },
        Content {
            codes: &codes,
            ..valid
        },
        Content {
            scales: &large,
            ..valid
        },
        Content {
            scales: &scales,
            ..valid
        },
        Content {
            centroids: &centroids,
            ..valid
        },
        Content {
            centroids: &case.centroids[1..],
            ..valid
        },
    ] {
        assert!(encode(content, &pool::current().unwrap()).is_err());
    }
}
