//! Writing a tensor.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::huffman::{self, Lengths, Writer};
use super::{ALIGNMENT, CODES, ENTRY, INDEX, INNER, LENGTHS, MAGIC, STREAMS, VERSION};
use crate::formats::groupwise::{HEADER_BYTES, View};
use crate::{Error, Result};

/// Codes a group-wise tensor.
///
/// # Errors
/// [`Error::InvalidArgument`]: a stream of a block has more than 65,535 bytes; rows are too long for this format.
pub fn encode(view: &View, pool: &ThreadPool) -> Result<Vec<u8>> {
    let layout = view.layout();
    let blocks = layout.shape().experts * layout.blocks();
    let lengths = pool
        .install(|| count(view, blocks))
        .map(|counts| huffman::lengths(&counts));
    let codes = Codes::new(&lengths);
    let coded: Vec<Vec<Vec<u8>>> = pool.install(|| {
        (0..blocks)
            .into_par_iter()
            .map(|block| codes.block(sections(view, block)))
            .collect()
    });
    let mut out = vec![0; INDEX];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    out[INNER..LENGTHS].copy_from_slice(&view.bytes()[..HEADER_BYTES]);
    for (at, pair) in lengths.as_flattened().as_chunks::<2>().0.iter().enumerate() {
        out[LENGTHS + at] = pair[0] | pair[1] << 4;
    }
    out.reserve(blocks * ENTRY);
    for stream in coded.iter().flatten() {
        match u16::try_from(stream.len()) {
            Ok(length) => out.extend(length.to_le_bytes()),
            Err(_) => {
                return Err(Error::InvalidArgument(format!(
                    "a stream of {} bytes",
                    stream.len()
                )));
            }
        }
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    let start = out.len();
    coded.iter().flatten().for_each(|stream| out.extend(stream));
    let payload = (out.len() - start) as u64;
    out[16..24].copy_from_slice(&payload.to_le_bytes());
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    Ok(out)
}

/// All parameters of a block, and all its codes.
fn sections(view: &View, block: usize) -> [Vec<u8>; 2] {
    let (mut parameters, mut codes) = (Vec::new(), Vec::new());
    for record in view.layout().records(view.block(block)) {
        parameters.extend(record.0);
        codes.extend(record.1);
    }
    [parameters, codes]
}

type Counts = [[u64; 256]; CODES];

/// How often each byte occurs, for each code.
fn count(view: &View, blocks: usize) -> Counts {
    let none = || [[0; 256]; CODES];
    let add = |mut counts: Counts, block: usize| {
        let [parameters, codes] = sections(view, block);
        for pair in parameters.as_chunks::<2>().0 {
            counts[0][usize::from(pair[0])] += 1;
            counts[1][usize::from(pair[1])] += 1;
        }
        codes.iter().for_each(|&byte| counts[2][usize::from(byte)] += 1);
        counts
    };
    let sum = |mut a: Counts, b: Counts| {
        a.as_flattened_mut()
            .iter_mut()
            .zip(b.as_flattened())
            .for_each(|(a, b)| *a += b);
        a
    };
    (0..blocks).into_par_iter().fold(none, add).reduce(none, sum)
}

/// Codewords and their lengths, for each code.
struct Codes {
    words: [[u16; 256]; CODES],
    lengths: [Lengths; CODES],
}

impl Codes {
    fn new(lengths: &[Lengths; CODES]) -> Codes {
        Codes {
            words: std::array::from_fn(|code| huffman::codewords(&lengths[code])),
            lengths: *lengths,
        }
    }

    fn put(&self, code: usize, byte: u8, out: &mut Writer) {
        out.put(
            self.words[code][usize::from(byte)],
            self.lengths[code][usize::from(byte)],
        );
    }

    /// The streams of a block.
    fn block(&self, [parameters, bytes]: [Vec<u8>; 2]) -> Vec<Vec<u8>> {
        let mut streams = Vec::with_capacity(STREAMS);
        let mut writer = Writer::default();
        for (at, &byte) in parameters.iter().enumerate() {
            self.put(at % 2, byte, &mut writer);
        }
        streams.push(writer.finish());
        for part in bytes.chunks(bytes.len().div_ceil(STREAMS - 1).max(1)) {
            let mut writer = Writer::default();
            part.iter().for_each(|&byte| self.put(2, byte, &mut writer));
            streams.push(writer.finish());
        }
        streams.resize(STREAMS, Vec::new());
        streams
    }
}
