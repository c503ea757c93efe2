//! Decoding tables of ternary codes, for kernels that are compiled elsewhere.

use moepack_core::formats::ternary::dict16;
use moepack_core::formats::ternary::fsv8::{COUNT, Lut};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::error::invalid;

/// Return the decoding table of an FSV8 dictionary, or of dict16.
#[pyfunction]
#[pyo3(signature = (dictionary=None))]
pub fn ternary_table(
    py: Python<'_>,
    dictionary: Option<usize>,
) -> PyResult<(Bound<'_, PyArray1<u32>>, u32, bool)> {
    let (entries, class_bits, three_slots) = match dictionary {
        None => (py.detach(dict16::sparse).to_vec(), 0, true),
        Some(id) if id < COUNT => {
            let lut = Lut::embedded(id);
            (lut.entries.clone(), lut.class_bits, lut.three_slots)
        }
        Some(id) => return invalid(format!("there is no dictionary {id}")),
    };
    Ok((entries.into_pyarray(py), class_bits, three_slots))
}
