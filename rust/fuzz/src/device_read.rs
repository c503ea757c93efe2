//! Arbitrary bytes as the GPU layout of a coded tensor: restoring is memory-safe, and valid tensors round-trip
//! through the layout.

use moepack_core::Error;
use moepack_core::formats::coded::{Coded, device};
use moepack_core::simd::Isa;

/// Larger tensors only cost time.
const MAX_SIZE: usize = 1 << 16;

/// Reads the bytes as a layout, and as a tensor to lay out.
pub fn run(data: &[u8]) {
    let _ = read(data);
    let _ = round_trip(data);
}

fn read(data: &[u8]) -> Result<(), Error> {
    let packed = device::from_device(data, crate::pool())?;
    let view = Coded::parse(&packed)?;
    view.view(&packed)?.verify(Isa::SCALAR, crate::pool())
}

fn round_trip(data: &[u8]) -> Result<(), Error> {
    let (pool, coded) = (crate::pool(), Coded::parse(data)?);
    if !crate::is_small(coded.layout().shape(), MAX_SIZE) {
        return Ok(());
    }
    let view = coded.view(data)?;
    view.verify(Isa::SCALAR, pool)?;
    let laid_out = view.to_device(None, pool)?;
    let back = device::from_device(&laid_out, pool)?;
    assert!(back == data);
    Ok(())
}
