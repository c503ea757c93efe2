//! Encoded streams, and the assembly of a tensor from them.

use rayon::prelude::*;

use super::fit::Frequencies;
use super::layout::{Layout, STATE_BYTES};
use super::scales::{self, Scales};

/// An encoded stream.
pub(super) struct Stream {
    /// States and renormalization bytes.
    pub bytes: Vec<u8>,
    /// Bit planes.
    pub planes: Vec<u8>,
    pub table: usize,
    /// Positions, ascending, and differences.
    pub exceptions: Vec<(u32, i32)>,
}

/// Assembles the sections of a tensor.
pub(super) fn assemble(
    mut layout: Layout,
    given: Scales,
    tables: &[Frequencies],
    streams: &[Stream],
) -> Vec<u8> {
    layout.tables = tables.len();
    layout.table_symbols = tables.iter().map(|table| table.counts.len()).max().unwrap_or(2);
    let parts = || streams.iter().flat_map(|stream| [&stream.bytes, &stream.planes]);
    layout.payload = parts().map(Vec::len).sum();
    layout.exceptions = streams.iter().map(|stream| stream.exceptions.len()).sum();
    let long = |stream: &Stream| {
        stream.bytes.len() - STATE_BYTES > usize::from(u16::MAX)
            || stream.exceptions.len() > usize::from(u8::MAX)
    };
    let large = |&(_, difference): &(u32, i32)| i8::try_from(difference).is_err();
    layout.entry = if streams.iter().any(long) { 8 } else { 4 };
    layout.exception = if streams.iter().flat_map(|stream| &stream.exceptions).any(large) {
        8
    } else {
        4
    };
    let (Some(total), Some(sections)) = (layout.total(), layout.sections()) else {
        unreachable!("data in memory can be counted");
    };
    let mut out = vec![0; total];
    layout.write(&mut out);
    let rows = out[sections.tables.clone()].chunks_exact_mut(layout.table_bytes());
    for (row, table) in rows.zip(tables) {
        row[0] = table.lowest as u8;
        row[1..=table.counts.len()].copy_from_slice(&table.counts);
    }
    scales::write(&layout, given.rows, &mut out[sections.scales.clone()]);
    let columns = given.columns.unwrap_or_default();
    scales::write(&layout, columns, &mut out[sections.columns.clone()]);
    write_index(&layout, streams, &mut out[sections.index.clone()]);
    write_exceptions(&layout, streams, &mut out[sections.exceptions.clone()]);
    let mut payload = &mut out[sections.payload.clone()];
    let places: Vec<_> = parts()
        .map(|part| (payload.split_off_mut(..part.len()), part))
        .collect();
    places.into_par_iter().for_each(|(place, part)| match place {
        Some(place) => place.copy_from_slice(part),
        None => unreachable!("the payload has room for all parts"),
    });
    out
}

/// Writes the entry of each stream: its length, its table, and the number of its exceptions.
fn write_index(layout: &Layout, streams: &[Stream], out: &mut [u8]) {
    for (entry, stream) in out.chunks_exact_mut(layout.entry).zip(streams) {
        let (length, table) = ((stream.bytes.len() - STATE_BYTES) as u64, stream.table as u64);
        let exceptions = stream.exceptions.len() as u64;
        let word = match layout.entry {
            4 => length | table << 16 | exceptions << 24,
            _ => length | table << 32 | exceptions << 40,
        };
        entry.copy_from_slice(&word.to_le_bytes()[..layout.entry]);
    }
}

/// Writes the exceptions of all streams: differences, then positions, in 1 + 3 or 4 + 4 bytes.
fn write_exceptions(layout: &Layout, streams: &[Stream], out: &mut [u8]) {
    let all = streams.iter().flat_map(|stream| &stream.exceptions);
    for (bytes, &(place, difference)) in out.chunks_exact_mut(layout.exception).zip(all) {
        let (difference, place) = (difference.to_le_bytes(), place.to_le_bytes());
        let width = if layout.exception == 4 { 1 } else { 4 };
        bytes[..width].copy_from_slice(&difference[..width]);
        bytes[width..].copy_from_slice(&place[..layout.exception - width]);
    }
}
