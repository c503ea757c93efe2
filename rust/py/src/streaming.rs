//! Channel records that are loaded from a file on demand.

use std::path::PathBuf;
use std::sync::Arc;

use moepack_core::Result;
use moepack_core::formats::channels::View;
use moepack_core::streaming::{Failure, Place, Records, Slots};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyEOFError, PyOSError, PyTypeError};
use pyo3::prelude::*;

use crate::arrays::{counts, filled, values};
use crate::error::{detached, raise};
use crate::tensor::PackedTensor;

/// Memory for records, shared by the tensors of a model: memory of dropped records is reused.
#[pyclass(frozen, module = "moepack._core")]
pub struct RecordMemory(Arc<Slots>);

#[pymethods]
impl RecordMemory {
    #[new]
    fn new() -> RecordMemory {
        RecordMemory(Arc::default())
    }
}

/// Packed channels whose records are loaded from a file on demand.
///
/// Args:
///     memory: the memory for loaded records.
///     head: uint8, contiguous: the bytes before the first record.
///     file: the file.
///     start: the offset of the tensor in the file.
///     direct: bypass the page cache; the file system must support it.
///
/// Raises:
///     CorruptionError: `head` contradicts the format.
///     OSError: the file cannot be opened.
#[pyclass(frozen, module = "moepack._core")]
pub struct StreamedChannels(Records);

#[pymethods]
impl StreamedChannels {
    #[new]
    fn new(
        py: Python<'_>,
        memory: &RecordMemory,
        head: PyReadonlyArray1<'_, u8>,
        file: PathBuf,
        start: u64,
        direct: bool,
    ) -> PyResult<StreamedChannels> {
        let place = Place {
            file: &file,
            start,
            direct,
        };
        let head = values(&head, "head")?;
        let found = py.detach(|| Records::open(memory.0.clone(), head, &place));
        found.map(StreamedChannels).map_err(failed)
    }

    /// The format with the main part of its specification: "channels-8bit".
    #[getter]
    fn format(&self) -> String {
        format!("channels-{}bit", self.0.layout().width().bits())
    }

    /// Experts, channels, and the columns of both halves of a record.
    #[getter]
    fn shape(&self) -> (usize, usize, usize) {
        let shape = self.0.layout().shape();
        (shape.experts, shape.rows, shape.columns)
    }

    /// The bytes of a record.
    #[getter]
    fn record_bytes(&self) -> usize {
        self.0.layout().record_bytes()
    }

    /// The bytes of the buffer of each reading thread.
    #[getter]
    fn buffer_bytes(&self) -> usize {
        self.0.buffer_bytes()
    }

    /// Return the experts' thresholds, float32 [experts].
    fn thresholds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        filled(py, [self.shape().0], |out: &mut [f32]| {
            let write = |view: View| {
                out.iter_mut()
                    .enumerate()
                    .for_each(|(expert, out)| *out = view.threshold(expert));
                Ok(())
            };
            self.0.view(write).map_err(raise)
        })
    }

    /// Load records.
    ///
    /// Args:
    ///     records: int64, ascending: their numbers, counted over all experts.
    ///     threads: the maximum number of reading threads.
    ///
    /// Returns:
    ///     The number of reads, and their bytes.
    ///
    /// Raises:
    ///     EOFError: the file ends early; the argument is the byte where it ends.
    ///     OSError: the drive reports an error.
    ///     ValueError: a record does not exist.
    fn read(
        &self,
        py: Python<'_>,
        records: PyReadonlyArray1<'_, i64>,
        threads: usize,
    ) -> PyResult<(usize, usize)> {
        let numbers = counts(&records, "records")?;
        let count = py.detach(|| self.0.read(&numbers, threads)).map_err(failed)?;
        Ok((count.reads, count.bytes))
    }

    /// Drop records, int64, ascending; records that are not loaded are ignored.
    fn drop(&self, py: Python<'_>, records: PyReadonlyArray1<'_, i64>) -> PyResult<()> {
        let numbers = counts(&records, "records")?;
        detached(py, || self.0.drop(&numbers))
    }
}

fn failed(failure: Failure) -> PyErr {
    match failure {
        Failure::Argument(error) => raise(error),
        Failure::Ends(place) => PyEOFError::new_err(place),
        Failure::System(place, error) => {
            let text = error.to_string();
            let text = text.split(" (os error").next().unwrap_or_default();
            PyOSError::new_err((error.raw_os_error(), format!("{text} at byte {place}")))
        }
    }
}

/// Channels that take part in products.
pub enum Channels<'a, 'py> {
    /// A packed tensor, completely in memory.
    Packed(PyReadonlyArray1<'py, u8>),
    /// A tensor whose records are loaded on demand.
    Streamed(&'a StreamedChannels),
}

impl<'a, 'py> Channels<'a, 'py> {
    /// Converts an object to channels.
    ///
    /// # Errors
    /// TypeError if it is neither a `PackedTensor` nor a `StreamedChannels`.
    pub fn of(object: &'a Bound<'py, PyAny>) -> PyResult<Channels<'a, 'py>> {
        if let Ok(tensor) = object.cast::<PackedTensor>() {
            return Ok(Channels::Packed(tensor.get().bytes(object.py())?));
        }
        match object.cast::<StreamedChannels>() {
            Ok(streamed) => Ok(Channels::Streamed(streamed.get())),
            Err(_) => {
                let kind = object.get_type();
                Err(PyTypeError::new_err(format!("{kind} has no channels")))
            }
        }
    }

    /// The part that is read in place.
    ///
    /// # Errors
    /// ValueError if the bytes are not contiguous.
    pub fn source(&self) -> PyResult<Source<'_>> {
        Ok(match self {
            Channels::Packed(data) => Source::Packed(values(data, "data")?),
            Channels::Streamed(streamed) => Source::Streamed(&streamed.0),
        })
    }
}

/// The bytes of channels, which other threads may read.
pub enum Source<'a> {
    /// The bytes of a whole tensor.
    Packed(&'a [u8]),
    /// A tensor with some records loaded.
    Streamed(&'a Records),
}

impl Source<'_> {
    /// Calls `work` with the tensor.
    ///
    /// # Errors
    /// [`moepack_core::Error::Corruption`] if the bytes have another format; errors of `work`.
    pub fn view<T>(&self, work: impl FnOnce(View<'_>) -> Result<T>) -> Result<T> {
        match self {
            Source::Packed(data) => work(View::parse(data)?),
            Source::Streamed(records) => records.view(work),
        }
    }
}
