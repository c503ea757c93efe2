//! Arbitrary bytes as a packed tensor of any format: only the checks of opening, so that it runs often. No kernel is
//! linked in, because coverage would count its edges after each run.

use moepack_core::formats::{channels, codebook, coded, compensated, groupwise, ternary};
use moepack_core::types::Shape;

/// Opens the bytes by their magic; a tensor that opens has a shape that its bytes can hold.
pub fn run(data: &[u8]) {
    let Some(magic) = data.first_chunk() else { return };
    let shape = match magic {
        b"MOEPCHNL" => channels::View::parse(data).map(|view| view.layout().shape()),
        b"MOEPCODE" => codebook::View::parse(data).map(|view| view.layout().shape()),
        b"MOEPCOMP" => compensated::View::parse(data).map(|view| view.layout().base().shape()),
        b"MOEPGRPW" => groupwise::View::parse(data).map(|view| view.layout().shape()),
        b"MOEPRANS" => coded::Coded::parse(data).map(|coded| coded.layout().shape()),
        b"MOEPTERN" => ternary::TernaryView::parse(data).map(|view| view.metadata().shape()),
        _ => return,
    };
    let Ok(shape) = shape else { return };
    assert!(
        shape.has_valid_ndim() && holds(data.len(), shape),
        "{shape:?} in {} bytes",
        data.len()
    );
}

/// Returns whether `bytes` bytes can hold a tensor: a row of weights has at least one bit. The number of rows without
/// weights is bounded by the registry instead.
fn holds(bytes: usize, shape: Shape) -> bool {
    shape.columns == 0 || shape.all_rows().is_some_and(|rows| rows <= 8 * bytes)
}
