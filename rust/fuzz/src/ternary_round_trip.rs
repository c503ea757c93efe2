//! Arbitrary codes survive encoding and decoding with both codes, within the size bounds.

use moepack_core::formats::ternary::{self, Code, TernaryView};
use moepack_core::types::Shape;

/// Packs codes; the first two bytes give their number of columns and share of zeros.
pub fn run(data: &[u8]) {
    let Some((&[columns, sparsity], data)) = data.split_first_chunk() else {
        return;
    };
    let columns = usize::from(columns) + 1;
    let shape = Shape {
        experts: 1,
        rows: data.len() / columns,
        columns,
        ndim: 2,
    };
    // The sparser the codes are to be, the more byte values stand for zero.
    let code = |&byte: &u8| match byte {
        0 => 0,
        byte if byte <= sparsity => 0,
        byte => 1 - 2 * (byte & 1) as i8,
    };
    let codes: Vec<i8> = data[..shape.rows * columns].iter().map(code).collect();
    for code in Code::ALL {
        round_trip(&codes, shape, code);
    }
}

fn round_trip(codes: &[i8], shape: Shape, code: Code) {
    let pool = crate::pool();
    let levels = vec![(-1.5, 0.25); shape.rows];
    let blob = ternary::encode(codes, &levels, shape, code, pool).expect("valid codes are encoded");
    let view = TernaryView::parse(&blob).expect("encoded tensors parse");
    view.verify(pool).expect("encoded tensors are valid");
    let mut decoded = vec![0; codes.len()];
    ternary::decode_codes(&view, &mut decoded, pool).expect("encoded tensors decode");
    assert!(decoded == codes);
    if code == Code::Fsv8 {
        assert!(view.payload_bytes() <= shape.rows * shape.columns.div_ceil(4));
    }
}
