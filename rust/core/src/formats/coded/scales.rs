//! Scales of rows and columns: a weight is `(scale * code) * column`, in f32 and in this order.
//!
//! A single step for a whole tensor treats all input channels alike, although their sensitivities differ by orders of
//! magnitude. Column scales give each channel its own step. An encoder divides by them before it rounds; products
//! multiply the activations by them, so that inner loops do not depend on them.

use std::ops::Range;

use super::column_scales::ColumnScales;
use super::invalid;
use super::layout::Layout;
use super::view::CodedView;
use crate::Result;
use crate::types::Shape;

/// The scales for an encoder, all finite. They are stored in bf16 if it represents all of them exactly, otherwise in
/// f32.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    /// E x R, or one value for the whole tensor.
    pub rows: &'a [f32],
    /// E x C, or C for all experts; `None` if columns have no scales.
    pub columns: Option<&'a [f32]>,
}

impl<'a, T: AsRef<[f32]> + ?Sized> From<&'a T> for Scales<'a> {
    /// Row scales without column scales.
    fn from(rows: &'a T) -> Scales<'a> {
        Scales {
            rows: rows.as_ref(),
            columns: None,
        }
    }
}

impl Scales<'_> {
    fn all(&self) -> impl Iterator<Item = f32> {
        self.rows.iter().chain(self.columns.unwrap_or_default()).copied()
    }

    /// The kind of column scales for a shape.
    fn kind(&self, shape: Shape) -> Option<ColumnScales> {
        match self.columns.map(<[f32]>::len) {
            None => Some(ColumnScales::None),
            Some(length) if length == shape.columns => Some(ColumnScales::Shared),
            Some(length) if shape.experts.checked_mul(shape.columns) == Some(length) => {
                Some(ColumnScales::OfExpert)
            }
            Some(_) => None,
        }
    }

    /// Sets the layout's fields for these scales.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if their number does not fit the shape or one is not finite.
    pub(super) fn describe(&self, layout: &mut Layout) -> Result<()> {
        let shape = layout.shape;
        if self.rows.len() != 1 && shape.all_rows() != Some(self.rows.len()) {
            return invalid(format!("{} scales for {shape:?}", self.rows.len()));
        }
        let Some(columns) = self.kind(shape) else {
            let count = self.columns.map_or(0, <[f32]>::len);
            return invalid(format!("{count} column scales for {shape:?}"));
        };
        if let Some(row) = self.rows.iter().position(|scale| !scale.is_finite()) {
            return invalid(format!("scale {} of row {row} is not finite", self.rows[row]));
        }
        let given = self.columns.unwrap_or_default();
        if let Some(place) = given.iter().position(|scale| !scale.is_finite()) {
            let (scale, column) = (given[place], place % shape.columns);
            return invalid(format!("scale {scale} of column {column} is not finite"));
        }
        layout.row_scales = self.rows.len() != 1;
        layout.column_scales = columns;
        layout.wide_scales = self
            .all()
            .any(|scale| half::bf16::from_f32(scale).to_f32() != scale);
        Ok(())
    }
}

/// Writes scales in the layout's type.
pub(super) fn write(layout: &Layout, scales: &[f32], out: &mut [u8]) {
    let width = if layout.wide_scales { 4 } else { 2 };
    for (out, &scale) in out.chunks_exact_mut(width).zip(scales) {
        match layout.wide_scales {
            true => out.copy_from_slice(&scale.to_le_bytes()),
            false => out.copy_from_slice(&half::bf16::from_f32(scale).to_le_bytes()),
        }
    }
}

/// The stored scales of an expert's columns, C of them.
#[derive(Debug, Clone, Copy)]
pub enum Columns<'a> {
    /// In bf16.
    Narrow(&'a [[u8; 2]]),
    /// In f32.
    Wide(&'a [[u8; 4]]),
}

impl Columns<'_> {
    /// Calls `put` with each item and the scale of its column, starting at the first column.
    #[inline(always)]
    pub fn each<T>(self, items: impl Iterator<Item = T>, mut put: impl FnMut(T, f32)) {
        match self {
            Columns::Narrow(scales) => items
                .zip(scales)
                .for_each(|(item, &scale)| put(item, half::bf16::from_le_bytes(scale).to_f32())),
            Columns::Wide(scales) => items
                .zip(scales)
                .for_each(|(item, &scale)| put(item, f32::from_le_bytes(scale))),
        }
    }

    /// Multiplies values by the scales of their columns, starting at the first column.
    pub fn multiply(self, values: &mut [f32]) {
        self.each(values.iter_mut(), |value, scale| *value *= scale);
    }
}

impl<'a> CodedView<'a> {
    /// The scale of a row, counted over all experts.
    #[inline]
    pub fn scale(&self, row: usize) -> f32 {
        let layout = &self.coded.layout;
        let scales = &self.data[self.coded.sections.scales.clone()];
        let index = if layout.row_scales { row } else { 0 };
        match layout.wide_scales {
            true => f32::from_le_bytes(scales.as_chunks().0[index]),
            false => half::bf16::from_le_bytes(scales.as_chunks().0[index]).to_f32(),
        }
    }

    /// The scales of an expert's columns, if the tensor has any.
    #[inline]
    pub fn columns(&self, expert: usize) -> Option<Columns<'a>> {
        let layout = &self.coded.layout;
        let row = match layout.column_scales {
            ColumnScales::None => return None,
            ColumnScales::Shared => 0,
            ColumnScales::OfExpert => expert,
        };
        Some(self.stored_columns(row * layout.shape.columns..(row + 1) * layout.shape.columns))
    }

    /// A range of all column scales, with rows concatenated.
    fn stored_columns(&self, places: Range<usize>) -> Columns<'a> {
        let scales = &self.data[self.coded.sections.columns.clone()];
        match self.coded.layout.wide_scales {
            true => Columns::Wide(&scales.as_chunks().0[places]),
            false => Columns::Narrow(&scales.as_chunks().0[places]),
        }
    }

    /// A number that identifies the column scales among those of all tensors in memory: their address, or 0 without
    /// scales.
    pub fn columns_identity(&self) -> usize {
        match self.coded.layout.column_scales {
            ColumnScales::None => 0,
            _ => self.data[self.coded.sections.columns.clone()].as_ptr().addr(),
        }
    }

    /// All row scales, E x R or one.
    pub fn row_scales(&self) -> Vec<f32> {
        (0..self.coded.layout.scales())
            .map(|row| self.scale(row))
            .collect()
    }

    /// All column scales, E x C or C; empty without column scales.
    pub fn column_scales(&self) -> Vec<f32> {
        let width = if self.coded.layout.wide_scales { 4 } else { 2 };
        let count = self.coded.sections.columns.len() / width;
        let mut scales = Vec::with_capacity(count);
        let places = std::iter::repeat_n((), count);
        self.stored_columns(0..count)
            .each(places, |(), scale| scales.push(scale));
        scales
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::gaussian;
    use super::super::{Coded, Symbols, encode};
    use super::*;
    use crate::pool;
    use crate::simd::Isa;

    const SHAPE: Shape = Shape {
        experts: 2,
        rows: 5,
        columns: 8,
        ndim: 3,
    };

    fn packed(shape: Shape, rows: &[f32], columns: &[f32]) -> Result<Vec<u8>> {
        let codes = gaussian(shape, 1.0, 5);
        let scales = Scales {
            rows,
            columns: Some(columns),
        };
        let pool = pool::current().unwrap();
        encode(&codes, scales, shape, None, Symbols::PLAIN, &pool)
    }

    fn numbers(count: usize, step: f32) -> Vec<f32> {
        (1..=count).map(|i| i as f32 * step).collect()
    }

    #[test]
    fn scales_round_trip_in_the_narrowest_common_type() {
        for (row, step, name) in [
            (0.5, 0.25, "bfloat16"),
            (0.1, 0.25, "float32"),
            (0.5, 0.1, "float32"),
        ] {
            for (count, kind) in [(8, ColumnScales::Shared), (16, ColumnScales::OfExpert)] {
                for rows in [vec![row], vec![row; 10]] {
                    let columns = numbers(count, step);
                    let data = packed(SHAPE, &rows, &columns).unwrap();
                    let coded = Coded::parse(&data).unwrap();
                    let (view, layout) = (coded.view(&data).unwrap(), coded.layout());
                    view.verify(Isa::SCALAR, &pool::current().unwrap()).unwrap();
                    assert_eq!((layout.column_scales(), layout.scale_type()), (kind, name));
                    assert!(view.row_scales() == rows && view.column_scales() == columns);
                    let mut values = vec![2.0; 8];
                    view.columns(1).unwrap().multiply(&mut values);
                    let own = &columns[count - 8..];
                    assert!(values.iter().zip(own).all(|(value, scale)| *value == 2.0 * scale));
                }
            }
        }
    }

    #[test]
    fn only_scales_that_are_given_take_bytes() {
        let one = Shape { experts: 1, ..SHAPE };
        let codes = gaussian(one, 1.0, 5);
        let pool = pool::current().unwrap();
        let plain = encode(&codes, &[0.5], one, None, Symbols::PLAIN, &pool).unwrap();
        let scaled = packed(one, &[0.5], &numbers(8, 0.5)).unwrap();
        // With one expert, its row is shared by all experts.
        assert_eq!((plain[60], scaled[60]), (0, 1));
        assert_eq!(plain.len() + 64, scaled.len());
        let view = Coded::parse(&plain).unwrap();
        let view = view.view(&plain).unwrap();
        assert!(view.columns(0).is_none() && view.column_scales().is_empty() && view.columns_identity() == 0);
        let empty = Shape { columns: 0, ..SHAPE };
        Coded::parse(&packed(empty, &[0.5], &[]).unwrap()).unwrap();
    }

    #[test]
    fn other_scales_are_refused() {
        for (columns, message) in [
            (vec![1.0; 7], "7 column scales"),
            (vec![1.0; 24], "24 column scales"),
            ([numbers(13, 1.0), vec![f32::NAN; 3]].concat(), "column 5"),
            ([numbers(7, 1.0), vec![f32::INFINITY]].concat(), "column 7"),
        ] {
            let error = packed(SHAPE, &[0.5], &columns).unwrap_err();
            assert!(matches!(error, crate::Error::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn damaged_scales_and_kinds_are_found() {
        let pool = pool::current().unwrap();
        for count in [8, 16] {
            let data = packed(SHAPE, &[0.5], &numbers(count, 0.1)).unwrap();
            let columns = Layout::read(&data).unwrap().sections().unwrap().columns;
            let mut bad = data.clone();
            bad[columns.end - 4..columns.end].copy_from_slice(&f32::NAN.to_le_bytes());
            let coded = Coded::parse(&bad).unwrap();
            let error = coded.view(&bad).unwrap().verify(Isa::SCALAR, &pool).unwrap_err();
            assert!(error.to_string().contains("column 7"), "{error}");
            for (at, value) in [(60, 0), (60, 3), (60, 255), (61, 1), (63, 1), (columns.end, 1)] {
                let mut bad = data.clone();
                bad[at] = value;
                // There is no padding after 16 scales in f32.
                assert!(
                    at == columns.end && count == 16 || Coded::parse(&bad).is_err(),
                    "{value} at {at}"
                );
            }
        }
    }
}
