//! The clustering of one row: sorting and merging, the shortest path, the nearest centroids.

/// The maximum number of clusters of a row: codes have at most 4 bits.
pub const MAX_CLUSTERS: usize = 16;

/// The buffers of a thread, reused for every row.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    order: Vec<(f32, f32)>,
    points: Vec<f64>,
    sums: Vec<Sums>,
    previous: Vec<f64>,
    current: Vec<f64>,
    /// The start of the last cluster, for each number of clusters minus one and each end of that cluster.
    starts: Vec<Vec<u32>>,
}

/// Sums over a prefix of the sorted values.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    weight: f64,
    first: f64,
    second: f64,
}

impl Scratch {
    /// Computes the centroids of a row; returns the error.
    pub fn solve(&mut self, values: &[f32], weights: &[f32], centroids: &mut [f32]) -> f64 {
        let mean = self.gather(values, weights);
        let count = self.points.len();
        if count <= centroids.len() {
            let last = self.points[count - 1];
            for (k, centroid) in centroids.iter_mut().enumerate() {
                *centroid = self.points.get(k).copied().unwrap_or(last) as f32;
            }
            return 0.0;
        }
        self.sum(mean);
        let error = self.path(centroids.len());
        self.means(mean, centroids);
        error
    }

    /// Sorts the values of positive weight and merges equal ones into `points`; returns their weighted mean.
    fn gather(&mut self, values: &[f32], weights: &[f32]) -> f64 {
        self.order.clear();
        if weights.iter().any(|&w| w > 0.0) {
            let pairs = values.iter().copied().zip(weights.iter().copied());
            self.order.extend(pairs.filter(|&(_, w)| w > 0.0));
        } else {
            self.order.extend(values.iter().map(|&v| (v, 1.0)));
        }
        self.order
            .sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        self.points.clear();
        self.sums.clear();
        self.sums.push(Sums::default());
        let mut sums = Sums::default();
        for &(value, weight) in &self.order {
            let (value, weight) = (f64::from(value), f64::from(weight));
            // -0 and 0 are equal and merge.
            if self.points.last() != Some(&value) {
                self.points.push(value);
                self.sums.push(Sums::default());
            }
            let at = self.sums.len() - 1;
            self.sums[at].weight += weight;
            sums.weight += weight;
            sums.first += weight * value;
        }
        sums.first / sums.weight
    }

    /// Replaces the weights of the points by prefix sums around `mean`.
    fn sum(&mut self, mean: f64) {
        let mut total = Sums::default();
        for (sums, point) in self.sums[1..].iter_mut().zip(&self.points) {
            let (weight, x) = (sums.weight, point - mean);
            total.weight += weight;
            total.first += weight * x;
            total.second += weight * x * x;
            *sums = total;
        }
    }

    /// Fills `starts` for one to `clusters` clusters, fewer than there are points; returns the lowest error.
    fn path(&mut self, clusters: usize) -> f64 {
        let count = self.points.len();
        self.starts.resize_with(clusters.max(self.starts.len()), Vec::new);
        for starts in &mut self.starts[..clusters] {
            starts.clear();
            starts.resize(count + 1, 0);
        }
        self.previous.clear();
        self.previous
            .extend((0..=count).map(|end| error(&self.sums, 0, end)));
        self.current.clear();
        self.current.resize(count + 1, 0.0);
        for k in 1..clusters {
            let mut row = Row {
                sums: &self.sums,
                previous: &self.previous,
                current: &mut self.current,
                starts: &mut self.starts[k],
            };
            // Only the last element of the last row of D is needed.
            let first = if k + 1 == clusters { count } else { k + 1 };
            row.fill(first, count, k, count - 1);
            std::mem::swap(&mut self.previous, &mut self.current);
        }
        self.previous[count]
    }

    /// Follows the path backwards and computes the centroids.
    fn means(&self, mean: f64, centroids: &mut [f32]) {
        let mut end = self.points.len();
        for k in (0..centroids.len()).rev() {
            let start = if k == 0 { 0 } else { self.starts[k][end] as usize };
            let (a, b) = (self.sums[start], self.sums[end]);
            centroids[k] = (mean + (b.first - a.first) / (b.weight - a.weight)) as f32;
            end = start;
        }
        // Far from the mean, rounding may swap neighbours.
        centroids.sort_unstable_by(f32::total_cmp);
    }
}

/// The error of the points `start..end` around their mean.
#[inline(always)]
fn error(sums: &[Sums], start: usize, end: usize) -> f64 {
    let (a, b) = (sums[start], sums[end]);
    let first = b.first - a.first;
    let weight = b.weight - a.weight;
    if weight > 0.0 {
        (b.second - a.second - first * first / weight).max(0.0)
    } else {
        0.0
    }
}

/// A row of D, computed from the row for one cluster less.
struct Row<'a> {
    sums: &'a [Sums],
    previous: &'a [f64],
    current: &'a mut [f64],
    starts: &'a mut [u32],
}

impl Row<'_> {
    /// Computes the elements `first..=last`, whose last clusters start in `low..=high`.
    fn fill(&mut self, first: usize, last: usize, low: usize, high: usize) {
        let middle = first + (last - first) / 2;
        let (mut least, mut best) = (f64::INFINITY, low);
        for start in low..=high.min(middle - 1) {
            let total = self.previous[start] + error(self.sums, start, middle);
            if total < least {
                (least, best) = (total, start);
            }
        }
        self.current[middle] = least;
        self.starts[middle] = best as u32;
        if first < middle {
            self.fill(first, middle - 1, low, best);
        }
        if middle < last {
            self.fill(middle + 1, last, best, high);
        }
    }
}

/// Computes the codes of the nearest of ascending centroids, the lower of two equally near.
pub(super) fn assign(values: &[f32], centroids: &[f32], codes: &mut [u8]) {
    let mut bounds = [f64::INFINITY; MAX_CLUSTERS];
    for (bound, pair) in bounds.iter_mut().zip(centroids.windows(2)) {
        // The bound of a repeated centroid stays infinite, so no value gets its code.
        if pair[0] < pair[1] {
            *bound = (f64::from(pair[0]) + f64::from(pair[1])) / 2.0;
        }
    }
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = bounds
            .iter()
            .map(|&bound| u8::from(f64::from(value) > bound))
            .sum();
    }
}
