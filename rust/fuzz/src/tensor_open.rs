//! Arbitrary bytes as a packed tensor of whatever format they name: what opening checks, alone, so that it runs
//! often. No kernel is linked in, whose edges coverage would count after each run.

use moepack_core::formats::{channels, codebook, coded, compensated, groupwise, ternary};
use moepack_core::types::Shape;

/// Opens the bytes as the format whose magic they begin with; a tensor that opens has a shape that its bytes can hold.
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

/// Whether so many bytes may hold a tensor: a row of weights has at least a bit. Of rows without weights there may be
/// any number here: the registry bounds them.
fn holds(bytes: usize, shape: Shape) -> bool {
    shape.columns == 0 || shape.all_rows().is_some_and(|rows| rows <= 8 * bytes)
}
