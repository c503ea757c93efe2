//! Records of channels that come from a file and go again.

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

/// Memory of records, which the tensors of a model share: what one gives up another takes.
#[pyclass(frozen, module = "moepack._core")]
pub struct RecordMemory(Arc<Slots>);

#[pymethods]
impl RecordMemory {
    #[new]
    fn new() -> RecordMemory {
        RecordMemory(Arc::default())
    }
}

/// Packed channels whose records come from a file and go again.
///
/// Args:
///     memory: where records lie while they are there.
///     head: uint8, contiguous: everything before the first record.
///     file: the file.
///     start: the tensor's first byte in it.
///     direct: read past the page cache; the file system must take such reads.
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

    /// The format with what matters most of its specification: "channels-8bit".
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

    /// Bytes of a record.
    #[getter]
    fn record_bytes(&self) -> usize {
        self.0.layout().record_bytes()
    }

    /// Bytes of the buffer of each thread that reads.
    #[getter]
    fn buffer_bytes(&self) -> usize {
        self.0.buffer_bytes()
    }

    /// The experts' thresholds, float32 [experts].
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

    /// Reads records.
    ///
    /// Args:
    ///     records: int64, ascending: their numbers over all experts.
    ///     threads: how many read at a time, at most.
    ///
    /// Returns:
    ///     How many reads it took, and their bytes.
    ///
    /// Raises:
    ///     EOFError: the file ends before; its argument is the byte.
    ///     OSError: the drive reports an error.
    ///     ValueError: there are no such records.
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

    /// Lets records go, int64, ascending; those that are not there are none.
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
    /// A packed tensor, all of whose bytes are there.
    Packed(PyReadonlyArray1<'py, u8>),
    /// A tensor whose records come and go.
    Streamed(&'a StreamedChannels),
}

impl<'a, 'py> Channels<'a, 'py> {
    /// The channels that an object is.
    ///
    /// # Errors
    /// TypeError: it is no `PackedTensor` or `StreamedChannels`.
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

    /// What of it is read in place.
    ///
    /// # Errors
    /// ValueError: the bytes are not contiguous.
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
    /// The tensor of which some records are there.
    Streamed(&'a Records),
}

impl Source<'_> {
    /// Calls `work` with the tensor.
    ///
    /// # Errors
    /// [`moepack_core::Error::Corruption`]: the bytes are of another format; what `work` gives.
    pub fn view<T>(&self, work: impl FnOnce(View<'_>) -> Result<T>) -> Result<T> {
        match self {
            Source::Packed(data) => work(View::parse(data)?),
            Source::Streamed(records) => records.view(work),
        }
    }
}
