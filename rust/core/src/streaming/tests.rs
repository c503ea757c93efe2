use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::Error;
use crate::formats::channels::tests::{case, shape};
use crate::formats::channels::{View, Width};
use crate::gemm::layer::Routing;
use crate::gemm::sparse::{Layer, Ups};
use crate::pool;
use crate::simd::Isa;

/// The bytes before the tensor in its file: not a multiple of a page.
const BEFORE: usize = 1000;
const HALF: usize = 1024;

/// A file with a tensor of two experts, and the tensor's bytes.
struct Fixture {
    file: PathBuf,
    tensor: Vec<u8>,
    rows: usize,
}

impl Fixture {
    fn new(rows: usize, width: Width) -> Fixture {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("moepack-streaming-{}-{number}", std::process::id());
        let (file, tensor) = (
            std::env::temp_dir().join(name),
            case(shape(2, rows, HALF), width, 0.5).blob,
        );
        let mut out = File::create(&file).unwrap();
        out.write_all(&[7; BEFORE]).unwrap();
        out.write_all(&tensor).unwrap();
        Fixture { file, tensor, rows }
    }

    fn open(&self) -> Records {
        let head = self.tensor.len() - 2 * self.rows * self.record();
        let place = Place {
            file: &self.file,
            start: BEFORE as u64,
            direct: false,
        };
        Records::open(Arc::new(Slots::default()), &self.tensor[..head], &place).unwrap()
    }

    fn record(&self) -> usize {
        View::parse(&self.tensor).unwrap().layout().record_bytes()
    }

    /// Asserts that exactly these records are loaded, with the bytes of the tensor.
    fn assert_there(&self, records: &Records, numbers: &[usize]) {
        let whole = View::parse(&self.tensor).unwrap();
        let compare = |view: View| {
            for number in 0..2 * self.rows {
                assert_eq!(view.is_there(number), numbers.contains(&number), "{number}");
            }
            for &number in numbers {
                for (found, expected) in view.halves(number).iter().zip(whole.halves(number)) {
                    assert_eq!((found.values, found.scales), (expected.values, expected.scales));
                }
            }
            Ok(())
        };
        records.view(compare).unwrap();
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        std::fs::remove_file(&self.file).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn loaded_records_have_the_bytes_of_the_file(
        calls in prop::collection::vec(prop::collection::btree_set(0_usize..120, 0..60), 1..5),
        threads in 1_usize..5,
    ) {
        let fixture = Fixture::new(60, Width::Int4);
        let records = fixture.open();
        let mut there: Vec<usize> = Vec::new();
        for call in calls {
            let call: Vec<usize> = call.into_iter().collect();
            let (gone, kept): (Vec<_>, Vec<_>) = there.iter().partition(|number| **number % 3 == 0);
            records.drop(&gone).unwrap();
            let missing: Vec<usize> = call.into_iter().filter(|number| !kept.contains(number)).collect();
            let count = records.read(&missing, threads).unwrap();
            prop_assert!(count.reads <= missing.len() && count.bytes >= missing.len() * fixture.record());
            there = [kept, missing].concat();
            there.sort();
            fixture.assert_there(&records, &there);
        }
    }
}

#[test]
fn neighbours_are_loaded_by_one_read_up_to_the_gap_and_the_length() {
    let fixture = Fixture::new(800, Width::Int8);
    let (records, record) = (fixture.open(), fixture.record());
    let near = GAP / record;
    assert_eq!(records.read(&[3, 3 + near], 2).unwrap().reads, 1);
    assert_eq!(records.read(&[3, 3 + near + 3], 2).unwrap().reads, 2);
    let (all, long) = ((0..1000).collect::<Vec<_>>(), READ / record);
    let count = records.read(&all, 3).unwrap();
    assert!((1000 / long..=1000 / (long - 2) + 1).contains(&count.reads));
    // A read covers the pages of its records; neighbours may share the first and the last page.
    assert!((1000 * record..1000 * record + 2 * PAGE * count.reads).contains(&count.bytes));
    assert_eq!(records.read(&[], 2).unwrap(), Count::default());
    fixture.assert_there(&records, &all);
}

#[test]
fn memory_of_dropped_records_is_reused() {
    let fixture = Fixture::new(40, Width::Bf16);
    let records = fixture.open();
    let address = |number: usize| {
        let place = |view: View| Ok(view.halves(number)[0].values.as_ptr() as usize);
        records.view(place).unwrap()
    };
    records.read(&[5], 1).unwrap();
    let before = address(5);
    assert_eq!(before % 64, 0);
    records.drop(&[4, 5]).unwrap();
    records.read(&[70], 1).unwrap();
    assert_eq!(address(70), before);
}

#[test]
fn truncated_and_missing_files_are_reported_and_load_nothing() {
    let fixture = Fixture::new(60, Width::Int8);
    let records = fixture.open();
    let end = (BEFORE + fixture.tensor.len() / 2) as u64;
    File::options()
        .write(true)
        .open(&fixture.file)
        .unwrap()
        .set_len(end)
        .unwrap();
    records.read(&[0, 1], 2).unwrap();
    let failure = records.read(&[2, 119], 2).unwrap_err();
    assert!(matches!(failure, Failure::Ends(at) if at >= end), "{failure:?}");
    fixture.assert_there(&records, &[0, 1]);
    let place = |file| Place {
        file,
        start: 0,
        direct: false,
    };
    let (head, nowhere) = (&fixture.tensor[..192], fixture.file.join("nowhere"));
    let opened = |head, file| Records::open(Arc::default(), head, &place(file)).map(|_| ());
    assert!(matches!(opened(head, &nowhere), Err(Failure::System(0, _))));
    let opened = opened(head, &fixture.file);
    assert!(
        matches!(opened, Err(Failure::Ends(at)) if at == end),
        "{opened:?}"
    );
}

#[test]
fn heads_and_numbers_are_checked() {
    let fixture = Fixture::new(4, Width::Int8);
    let place = Place {
        file: &fixture.file,
        start: BEFORE as u64,
        direct: false,
    };
    for head in [
        &[][..],
        &fixture.tensor[..100],
        &fixture.tensor[..191],
        &fixture.tensor,
    ] {
        let opened = Records::open(Arc::default(), head, &place).map(|_| ());
        assert!(matches!(opened, Err(Failure::Argument(_))), "{}", head.len());
    }
    let records = fixture.open();
    for numbers in [&[8][..], &[1, 1], &[2, 1]] {
        assert!(matches!(records.read(numbers, 1), Err(Failure::Argument(_))));
        assert!(matches!(records.drop(numbers), Err(Error::InvalidArgument(_))));
    }
}

#[test]
fn products_match_the_whole_tensor_and_refuse_missing_records() {
    for width in Width::ALL {
        let fixture = Fixture::new(70, width);
        let (records, pool) = (fixture.open(), pool::current().unwrap());
        let x: Vec<f32> = (0..HALF).map(|i| (i % 13) as f32 / 6.0 - 1.0).collect();
        let ups: Vec<f32> = (0..140)
            .map(|i| if i % 3 == 0 { i as f32 / 70.0 + 0.1 } else { 0.0 })
            .collect();
        let wanted: Vec<usize> = (0..140).filter(|i| i % 3 == 0).collect();
        let forward = |channels: View| {
            let routing = Routing {
                experts: &[0, 1],
                weights: &[0.5, 2.0],
                top_k: 2,
            };
            let (mut y, ups) = (vec![0.0; HALF], Ups::Given(&ups));
            let count = Layer { ups, channels }.forward(&x[..], routing, &mut y, Isa::SCALAR, &pool)?;
            Ok((y, count))
        };
        records.read(&wanted, 2).unwrap();
        let found = records.view(forward).unwrap();
        assert_eq!(found, forward(View::parse(&fixture.tensor).unwrap()).unwrap());
        records.drop(&[72]).unwrap();
        assert!(matches!(records.view(forward), Err(Error::InvalidArgument(_))));
    }
}
