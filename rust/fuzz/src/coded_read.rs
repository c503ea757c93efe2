//! Arbitrary bytes as an entropy-coded group-wise tensor: its products are those of the plain tensor that it stands
//! for.

use moepack_core::Error;
use moepack_core::formats::coded_groupwise::Coded;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Compute, Tensor};

/// Larger tensors only cost time.
const MAX_SIZE: usize = 1 << 16;

const TOKENS: usize = 3;

/// Expands the tensor and multiplies by both.
pub fn run(data: &[u8]) {
    let _ = read(data);
}

fn read(data: &[u8]) -> Result<(), Error> {
    let (pool, coded) = (crate::pool(), Coded::parse(data)?);
    let shape = coded.layout().shape();
    if !crate::is_small(shape, MAX_SIZE) {
        return Ok(());
    }
    let verified = coded.verify(data, pool);
    let bytes = coded.view(data)?.expand(pool)?;
    let plain = tensor::open(&bytes)?;
    assert!(verified.is_err() || plain.verify(&bytes, pool).is_ok());
    if shape.experts > 0 {
        let x = vec![1.0f32; TOKENS * shape.columns];
        let product = |tensor: &dyn Tensor, data: &[u8], compute: Compute| {
            let y = crate::product(tensor, data, &x, TOKENS, compute)?;
            Ok::<_, Error>(y.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        for &mode in plain.modes() {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let compute = Compute {
                    mode,
                    activation_bits: None,
                    isa,
                };
                assert!(product(&coded, data, compute)? == product(&*plain, &bytes, compute)?);
            }
        }
    }
    verified
}
