//! Coded tensors as projections for [`crate::gemm::layer`].

use std::ops::Range;
use std::sync::Arc;

use super::panels::{self, Panels};
use super::prepared::{Bytes, Token};
use super::{MODES, PIECE, products};
use crate::Result;
use crate::formats::coded::{
    Affine, BLOCK_ROWS, Chain, CodedView, ColumnScales, MAX_LOW_BITS, Register, decode, lows, side_by_side,
    well_side_by_side,
};
use crate::gemm::groupwise::Precision;
use crate::gemm::layer::{Cache, Job, Kernel, Products, Projection, Shared, Slots, Work, by_tokens, direct};
use crate::gemm::panel::{self, Backend};
use crate::gemm::require_mode;
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;
use crate::types::{Activations, Mode, Shape};

/// The maximum number of tokens that share decoded registers: their sums stay in the second-level cache.
const TOKENS: usize = 128;
/// The mapping of low bits to values: the identity.
const LOW: Affine = Affine {
    factor: 1,
    offset: 0,
    most: 1 << MAX_LOW_BITS,
};

/// A coded tensor with a mode and an instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Coded<'a> {
    view: CodedView<'a>,
    precision: Precision,
    isa: Isa,
    /// The backend for experts with many tokens, which are multiplied by panels.
    panels: Option<Backend>,
}

impl<'a> Coded<'a> {
    /// Products in `mode` with `isa`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if the mode does not exist ([`MODES`]) or the processor lacks the
    /// set.
    pub fn new(view: CodedView<'a>, mode: Mode, isa: Isa) -> Result<Coded<'a>> {
        require_mode(mode, &MODES, "a coded tensor")?;
        Ok(Coded {
            view,
            precision: if mode == Mode::Int8 {
                Precision::Int8
            } else {
                Precision::Exact
            },
            isa: isa.vectors(),
            panels: match mode {
                Mode::Auto | Mode::Bf16 => Backend::of_floats(isa),
                _ => None,
            },
        })
    }
}

impl Coded<'_> {
    /// Whether activations are prepared for each place of a job instead of each token, because experts have their own
    /// column scales.
    fn by_place(&self) -> bool {
        self.view.layout().column_scales() == ColumnScales::OfExpert
    }
}

impl Projection for Coded<'_> {
    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn row_bytes(&self) -> usize {
        let Shape { experts, rows, .. } = self.shape();
        let streams = experts * self.view.layout().streams();
        self.view.memory(0..streams).len() / (experts * rows).max(1)
    }

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        let (layout, first) = (self.view.layout(), expert * self.view.layout().streams());
        match layout.streams() {
            0 => &[],
            _ => {
                let height = layout.stream_rows();
                self.view
                    .memory(first + rows.start / height..first + rows.end.div_ceil(height))
            }
        }
    }

    fn granule(&self) -> usize {
        self.view.layout().stream_rows()
    }

    fn wide(&self) -> usize {
        self.granule() * well_side_by_side(self.isa)
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        let few = |few: &Arc<Job>| direct(self, few);
        let Some(backend) = self.panels else {
            return few(job);
        };
        let many = |many: &Arc<Job>| panel::products(Panels::new(self.view, backend), backend, many);
        by_tokens(job, panels::fewest(backend), many, few)
    }
}

/// The prepared tokens of jobs, by precision, number of columns, and identity of the column scales.
static TOKENS_OF: Cache<(Precision, usize, usize), Slots<Token>> = Cache::new();

/// The buffers that a thread reuses for all units.
#[derive(Default)]
pub struct Buffers<'w> {
    chains: Vec<Chain<'w>>,
    registers: Vec<Register>,
    /// The low bits of a piece.
    lows: Vec<Register>,
    /// The sums of a row block's rows for each chain and token, followed by those of low bits.
    sums: Vec<[f32; BLOCK_ROWS]>,
}

impl Kernel for Coded<'_> {
    type Prepared = Slots<Token>;
    type Scratch<'w>
        = Buffers<'w>
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Slots<Token>> {
        let key = (self.precision, self.shape().columns, self.view.columns_identity());
        let count = if self.by_place() {
            job.list.len()
        } else {
            job.tokens
        };
        TOKENS_OF.get(job, key, |_| Slots::new(count))
    }

    fn stages(&self, prepared: &Slots<Token>) -> [usize; 2] {
        [prepared.len(), 0]
    }

    fn prepare(&self, job: &Job, prepared: &Slots<Token>, _: usize, unit: usize, x: Activations) {
        // A job that is part of a split leaves out some tokens and places.
        let Some((token, expert)) = (match self.by_place() {
            true => job.expert_at(unit).map(|expert| (job.list[unit], expert)),
            false => job.has(unit).then_some((unit, 0)),
        }) else {
            return;
        };
        prepared.fill(unit, || {
            let (columns, scales) = (self.shape().columns, self.view.columns(expert));
            Token::new(self.isa, self.precision, &x, token, columns, scales)
        });
    }

    fn multiply<'w>(
        &'w self,
        work: Work<'w, Slots<Token>>,
        buffers: &mut Buffers<'w>,
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let height = self.view.layout().stream_rows();
        let streams = match self.view.layout().streams() {
            0 => 0..0,
            _ => rows.start / height..rows.end.div_ceil(height),
        };
        out.fill(0.0);
        let tokens: Vec<&Token> = match self.by_place() {
            true => work.places().map(|place| work.prepared.get(place)).collect(),
            false => work
                .tokens()
                .iter()
                .map(|&token| work.prepared.get(token))
                .collect(),
        };
        let outputs = out.chunks_mut(TOKENS * rows.len().max(1));
        for (tokens, out) in tokens.chunks(TOKENS).zip(outputs) {
            let mut part = Part {
                tokens,
                rows: rows.clone(),
                out,
            };
            for first in streams.clone().step_by(side_by_side(self.isa)) {
                let streams = first..(first + side_by_side(self.isa)).min(streams.end);
                self.streams(work.expert(), streams.clone(), buffers, &mut part);
                self.finish(work.expert(), streams, &mut part);
            }
        }
    }
}

/// Some tokens multiplied by some rows of an expert.
struct Part<'a> {
    tokens: &'a [&'a Token],
    rows: Range<usize>,
    /// [tokens, rows].
    out: &'a mut [f32],
}

impl Part<'_> {
    /// The outputs of a token, starting at a row of the expert.
    fn from(&mut self, token: usize, row: usize) -> &mut [f32] {
        &mut self.out[token * self.rows.len()..][row - self.rows.start..self.rows.len()]
    }
}

impl<'a> Coded<'a> {
    /// Multiplies by the weights of streams, without scales.
    fn streams<'w>(&self, expert: usize, streams: Range<usize>, buffers: &mut Buffers<'w>, part: &mut Part)
    where
        'a: 'w,
    {
        let layout = self.view.layout();
        let Buffers {
            chains,
            registers,
            lows: low_bits,
            sums,
        } = buffers;
        chains.clear();
        let numbers = streams.clone().map(|stream| expert * layout.streams() + stream);
        chains.extend(numbers.map(|number| self.view.chain(number)));
        registers.resize(chains.len() * PIECE, Register::ZERO);
        low_bits.resize(PIECE, Register::ZERO);
        let parts = if layout.low_bits() > 0 { 2 } else { 1 };
        let each = part.tokens.len();
        let width = parts * each;
        for block in 0..layout.stream_blocks() {
            for (chain, stream) in chains.iter_mut().zip(streams.clone()) {
                chain.start_block(layout.rows_of(stream, block));
            }
            sums.clear();
            sums.resize(chains.len() * width, [0.0; BLOCK_ROWS]);
            for first in (0..layout.quads()).step_by(PIECE) {
                let count = PIECE.min(layout.quads() - first);
                decode(self.isa, chains, count, registers);
                let pieces = chains.iter_mut().zip(registers.chunks_exact_mut(count));
                let pieces = pieces.zip(streams.clone()).zip(sums.chunks_exact_mut(width));
                for (((chain, registers), stream), sums) in pieces {
                    let (high, low) = sums.split_at_mut(each);
                    let affine = chain.counts(self.isa, registers);
                    self.piece(first, affine, registers, part.tokens, high);
                    if layout.low_bits() > 0 && layout.rows_of(stream, block) > 0 {
                        let place = block * layout.quads() + first;
                        let planes = self
                            .view
                            .planes(expert * layout.streams() + stream, place..place + count);
                        lows(self.isa, planes, &mut low_bits[..count]);
                        self.piece(first, LOW, &low_bits[..count], part.tokens, low);
                    }
                }
            }
            let streams = streams.clone().zip(sums.chunks_exact(width));
            for (stream, sums) in streams.filter(|(stream, _)| layout.rows_of(*stream, block) > 0) {
                let row = (stream * layout.stream_blocks() + block) * BLOCK_ROWS;
                let (high, low) = sums.split_at(each);
                self.store(row, high, low, part);
            }
        }
    }

    /// Stores the outputs of a block of rows: the sums of high bits, with those of low bits if there are any.
    fn store(&self, row: usize, high: &[[f32; BLOCK_ROWS]], low: &[[f32; BLOCK_ROWS]], part: &mut Part) {
        for token in 0..part.tokens.len() {
            let mut values = high[token];
            if !low.is_empty() {
                let unit = (1 << self.view.layout().low_bits()) as f32;
                let pairs = values.iter_mut().zip(low[token]);
                pairs.for_each(|(high, low)| *high = *high * unit + low);
            }
            let out = part.from(token, row);
            let count = out.len().min(BLOCK_ROWS);
            out[..count].copy_from_slice(&values[..count]);
        }
    }

    /// Adds the products of a piece, starting at a given register, to the sums of all tokens; `affine` gives the values
    /// of the registers' bytes.
    ///
    /// Several tokens share each read of a register. The sums of three planes fit the 16 vector registers of AVX2 (105 *
    /// 10^9 products per second on a Zen 3, 90 with four, 75 with one). Eight or nine planes fit the 32 of AVX-512.
    #[inline]
    fn piece(
        &self,
        first: usize,
        affine: Affine,
        registers: &[Register],
        tokens: &[&Token],
        sums: &mut [[f32; BLOCK_ROWS]],
    ) {
        let piece = Piece {
            isa: self.isa,
            first,
            affine,
            registers,
        };
        let rest = (tokens, sums);
        #[cfg(target_arch = "x86_64")]
        let rest = match (self.isa.kind(), self.precision) {
            (Kind::Avx512 | Kind::Amx, Precision::Int8) => piece.add::<8, 1>(rest),
            (Kind::Avx512 | Kind::Amx, Precision::Exact) => piece.add::<3, 3>(rest),
            _ => rest,
        };
        match self.precision {
            Precision::Int8 => piece.add::<1, 1>(piece.add::<3, 1>(rest)),
            Precision::Exact => piece.add::<1, 3>(rest),
        };
    }

    /// Adds exceptions, then applies scales.
    fn finish(&self, expert: usize, streams: Range<usize>, part: &mut Part) {
        let layout = self.view.layout();
        for stream in streams.clone() {
            for exception in self.view.exceptions(expert * layout.streams() + stream) {
                if let Some((row, column)) = self.view.locate(stream, exception.place) {
                    for (token, x) in part.tokens.iter().enumerate() {
                        part.from(token, row)[0] += exception.difference as f32 * x.value(column);
                    }
                }
            }
        }
        let height = layout.stream_rows();
        let rows = streams.start * height..(streams.end * height).min(part.rows.end);
        for token in 0..part.tokens.len() {
            for (row, out) in rows.clone().zip(part.from(token, rows.start)) {
                *out *= self.view.scale(expert * layout.shape().rows + row);
            }
        }
    }
}

/// Some tokens and their sums.
type Rest<'t> = (&'t [&'t Token], &'t mut [[f32; BLOCK_ROWS]]);

/// The decoded registers of a piece, starting at register `first`.
struct Piece<'r> {
    isa: Isa,
    first: usize,
    affine: Affine,
    registers: &'r [Register],
}

impl Piece<'_> {
    /// Adds the products with tokens of `P` planes to their sums, `N` tokens at a time; returns the rest of them.
    #[inline]
    fn add<'t, const N: usize, const P: usize>(&self, (tokens, sums): Rest<'t>) -> Rest<'t> {
        let (groups, others) = tokens.as_chunks::<N>();
        let (sums, rest) = sums.split_at_mut(N * groups.len());
        for (tokens, sums) in groups.iter().zip(sums.as_chunks_mut().0) {
            let x: [Bytes<P>; N] = std::array::from_fn(|i| tokens[i].piece(self.first));
            products::add(self.isa, self.registers, self.affine, x, sums);
        }
        (others, rest)
    }
}
