//! Arbitrary bytes as the layout for GPUs of a coded tensor: what is read back is read safely, and what verifies makes a
//! layout that comes back.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moepack_core::formats::coded::{Coded, device};
use moepack_core::simd::Isa;
use moepack_core::{Error, pool};

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
    let _ = round_trip(data);
});

fn read(data: &[u8]) -> Result<(), Error> {
    let pool = pool::current()?;
    let packed = device::from_device(data, &pool)?;
    let view = Coded::parse(&packed)?;
    view.view(&packed)?.verify(Isa::Scalar, &pool)
}

fn round_trip(data: &[u8]) -> Result<(), Error> {
    let (pool, coded) = (pool::current()?, Coded::parse(data)?);
    if coded.layout().shape().weights().is_none_or(|weights| weights > 1 << 18) {
        return Ok(());
    }
    let view = coded.view(data)?;
    view.verify(Isa::Scalar, &pool)?;
    let laid_out = view.to_device(None, &pool)?;
    assert!(device::from_device(&laid_out, &pool)? == data);
    Ok(())
}
