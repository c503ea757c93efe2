//! Arbitrary bytes as an entropy-coded group-wise tensor: its products are those of the plain tensor that it stands for.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moepack_core::formats::coded_groupwise::Coded;
use moepack_core::gemm::matmul_grouped;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Compute, Tensor};
use moepack_core::{Error, pool};

/// Larger tensors only cost time: one of no columns stands for billions of rows in no bytes.
const MAX_SIZE: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
});

fn read(data: &[u8]) -> Result<(), Error> {
    let (pool, coded) = (pool::current()?, Coded::parse(data)?);
    let shape = coded.layout().shape();
    if shape.experts.saturating_mul(shape.rows).max(shape.columns) > MAX_SIZE {
        return Ok(());
    }
    let verified = coded.verify(data, &pool);
    let bytes = coded.view(data)?.expand(&pool)?;
    let plain = tensor::open(&bytes)?;
    assert!(verified.is_err() || plain.verify(&bytes, &pool).is_ok());
    if shape.experts > 0 {
        let (x, mut offsets) = (vec![1.0f32; 3 * shape.columns], vec![0; shape.experts]);
        offsets.push(3);
        let product = |tensor: &dyn Tensor, data: &[u8], compute: Compute| {
            let mut y = vec![0.0; 3 * shape.rows];
            let projection = tensor.projection(data, compute)?;
            matmul_grouped(&*projection, &x[..], &offsets, &mut y, &pool)?;
            Ok::<_, Error>(y.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        for &mode in plain.modes() {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let compute = Compute { mode, activation_bits: None, isa };
                assert!(product(&coded, data, compute)? == product(&*plain, &bytes, compute)?);
            }
        }
    }
    verified
}
