// A table whose columns can be sorted with mouse or keyboard.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

export interface Column<Row> {
  name: string;
  title?: string;
  /** Right-aligned, and sorted largest first. */
  number?: boolean;
  value: (row: Row) => number | string | null;
  show?: (row: Row) => ComponentChildren;
}

export function Table<Row>({
  rows,
  columns,
  keyOf,
  label,
  sorted,
  most = 200,
}: {
  rows: readonly Row[];
  columns: readonly Column<Row>[];
  keyOf: (row: Row) => string;
  label: string;
  /** Name of the column that sorts at first; none keeps the order. */
  sorted?: string;
  most?: number;
}) {
  const [by, setBy] = useState<{ name: string; down: boolean } | null>(
    sorted === undefined ? null : { name: sorted, down: columns.find((each) => each.name === sorted)?.number ?? false },
  );
  const [shown, setShown] = useState(most);
  const column = by === null ? undefined : columns.find((each) => each.name === by.name);
  const ordered = column === undefined || by === null ? rows : [...rows].sort((a, b) => order(column, a, b, by.down));
  const sort = (each: Column<Row>): void =>
    setBy(by?.name === each.name ? { name: each.name, down: !by.down } : { name: each.name, down: each.number ?? false });
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead>
          <tr>
            {columns.map((each) => (
              <th
                key={each.name}
                scope="col"
                class={each.number ? "number" : ""}
                aria-sort={by?.name === each.name ? (by.down ? "descending" : "ascending") : "none"}
              >
                <button type="button" title={each.title} onClick={() => sort(each)}>
                  {each.name}
                  <span aria-hidden="true">{by?.name === each.name ? (by.down ? " ↓" : " ↑") : ""}</span>
                </button>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {ordered.slice(0, shown).map((row) => (
            <tr key={keyOf(row)}>
              {columns.map((each) => (
                <td key={each.name} class={each.number ? "number" : ""}>
                  {each.show === undefined ? (each.value(row) ?? "–") : each.show(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {ordered.length > shown && (
        <button type="button" class="more" onClick={() => setShown(shown + most)}>
          {ordered.length - shown} more
        </button>
      )}
    </div>
  );
}

function order<Row>(column: Column<Row>, a: Row, b: Row, down: boolean): number {
  const [left, right] = [column.value(a), column.value(b)];
  if (left === right) return 0;
  if (left === null) return 1;
  if (right === null) return -1;
  const sign =
    typeof left === "number" && typeof right === "number"
      ? left - right
      : String(left).localeCompare(String(right), "en", { numeric: true });
  return down ? -sign : sign;
}
