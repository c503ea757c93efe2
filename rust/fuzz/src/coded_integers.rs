//! Arbitrary bytes as a coded tensor: all instruction sets decode the same codes, products stay within bounds, and
//! re-encoded codes round-trip.

use moepack_core::Error;
use moepack_core::formats::coded::{self, Coded, CodedView};
use moepack_core::gemm::coded::{Coded as Weights, MODES};
use moepack_core::gemm::matmul;
use moepack_core::simd::Isa;

/// Larger tensors only cost time.
const MAX_SIZE: usize = 1 << 16;

/// Decodes, verifies and multiplies on all instruction sets; re-encodes valid tensors.
pub fn run(data: &[u8]) {
    let _ = read(data);
}

fn read(data: &[u8]) -> Result<(), Error> {
    let (pool, coded) = (crate::pool(), Coded::parse(data)?);
    let (view, shape) = (coded.view(data)?, coded.layout().shape());
    if !crate::is_small(shape, MAX_SIZE) {
        return Ok(());
    }
    let codes = decode(&view, Isa::SCALAR)?;
    let verified = view.verify(Isa::SCALAR, pool);
    for isa in Isa::all_available() {
        assert!(decode(&view, isa)? == codes && view.verify(isa, pool).is_ok() == verified.is_ok());
        for (mode, tokens) in MODES
            .into_iter()
            .flat_map(|mode| [1, 19].map(|tokens| (mode, tokens)))
        {
            if shape.experts > 0 {
                let (x, mut y) = (
                    vec![1.0f32; tokens * shape.columns],
                    vec![0.0; tokens * shape.rows],
                );
                let weights = Weights::new(view, mode, isa)?;
                matmul(&weights, shape.experts - 1, &x[..], tokens, &mut y, pool)?;
            }
        }
    }
    verified?;
    let (rows, columns) = (Some(coded.layout().stream_rows()), view.column_scales());
    let scales = coded::Scales {
        rows: &[1.0],
        columns: (coded.layout().column_scales() != coded::ColumnScales::None).then_some(&columns[..]),
    };
    let symbols = match coded.layout().symbols() {
        coded::Symbols::Plain { .. } => coded::Symbols::Plain {
            low_bits: coded::MAX_LOW_BITS,
        },
        coded::Symbols::Dependent => coded::Symbols::Dependent,
    };
    if let Ok(again) = coded::encode(&codes, scales, shape, rows, symbols, pool) {
        let coded = Coded::parse(&again).expect("encoded tensors parse");
        let view = coded.view(&again)?;
        view.verify(Isa::SCALAR, pool).expect("encoded tensors are valid");
        assert!(decode(&view, Isa::SCALAR)? == codes && view.column_scales() == columns);
    }
    Ok(())
}

fn decode(view: &CodedView, isa: Isa) -> Result<Vec<i32>, Error> {
    let mut codes = vec![0; view.layout().shape().weights().unwrap_or(0)];
    view.decode_rows(isa, &mut codes, crate::pool(), |_, row, out: &mut [i32]| {
        out.copy_from_slice(row);
        Ok(())
    })?;
    Ok(codes)
}
